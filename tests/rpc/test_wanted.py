"""What a query asks for comes off the wire as it was, and what cannot be is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, Exact, TopK, TopP
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.wanted import K_MAX, from_wanted, put_wanted
from query_optimizer.wanted import Wanted

SHARES = st.floats(0, 1, exclude_min=True)
RETRIEVALS = st.one_of(
    st.none(),
    st.just(Exact()),
    st.builds(Dipr, SHARES),
    st.builds(TopK, st.integers(1, K_MAX)),
    st.builds(TopP, SHARES),
)
REQUESTS = (pb.AttentionRequest, pb.AttendRequest, pb.AttentionTogetherRequest, pb.AttendTogetherRequest, pb.ExplainRequest)


@given(st.sampled_from(REQUESTS), st.builds(Wanted, RETRIEVALS, st.none() | SHARES, st.booleans()))
def test_both_ways(request_class, wanted):
    message = request_class()
    put_wanted(message, wanted)
    assert from_wanted(request_class.FromString(message.SerializeToString())) == wanted


def test_nothing_wanted_takes_no_bytes():
    for request_class in REQUESTS:
        message = request_class()
        put_wanted(message, Wanted())
        assert not message.SerializeToString()


def test_more_tokens_than_the_wire_can_count_are_all():
    message = pb.AttendRequest()
    put_wanted(message, Wanted(TopK(1 << 100)))
    assert from_wanted(message) == Wanted(TopK(K_MAX))


WRONG = {
    "alpha": pb.Retrieval(dipr=pb.Retrieval.Dipr(alpha=2)),
    "no alpha": pb.Retrieval(dipr=pb.Retrieval.Dipr()),
    "NaN": pb.Retrieval(dipr=pb.Retrieval.Dipr(alpha=float("nan"))),
    "k": pb.Retrieval(top_k=pb.Retrieval.TopK()),
    "p": pb.Retrieval(top_p=pb.Retrieval.TopP(p=-0.5)),
}


@pytest.mark.parametrize("retrieval", WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("request_class", REQUESTS)
def test_values_that_cannot_be(request_class, retrieval):
    with pytest.raises(InvalidArgument, match="expected"):
        from_wanted(request_class(retrieval=retrieval))


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan"), float("inf")])
def test_shares_that_cannot_be(share):
    with pytest.raises(InvalidArgument, match="max_missed_mass"):
        from_wanted(pb.AttendRequest(missed_mass_max=share))


def test_retrievals_of_another_version_are_refused():
    with pytest.raises(Unsupported, match="Dipr"):
        put_wanted(pb.AttendRequest(), Wanted("nearest"))
    with pytest.raises(Unsupported, match="one version"):
        from_wanted(pb.AttendRequest(retrieval=pb.Retrieval()))
