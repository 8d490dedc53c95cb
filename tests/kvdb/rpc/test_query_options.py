"""What a query asks for comes off the wire as it was, and what cannot be is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, Exact, TopK, TopP
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.query_options import BUDGET_MAX, K_MAX, KEPT_BYTES_MAX, put_query_options, to_query_options
from query_optimizer.query_options import Hints, QueryOptions

SHARES = st.floats(0, 1, exclude_min=True)
RETRIEVALS = st.one_of(
    st.none(),
    st.just(Exact()),
    st.builds(Dipr, SHARES),
    st.builds(TopK, st.integers(1, K_MAX)),
    st.builds(TopP, SHARES),
)
HINTS = st.builds(Hints, st.none() | st.just("flat"), st.lists(st.text()).map(tuple), st.none() | st.integers(1, BUDGET_MAX))
OPTIONS = st.one_of(
    st.builds(QueryOptions, RETRIEVALS, st.none() | SHARES, st.booleans(), HINTS),
    st.builds(QueryOptions, hints=HINTS, error_max=st.none() | st.floats(0, 1)),
)
REQUESTS = (
    pb.AttentionRequest,
    pb.AttendRequest,
    pb.AttentionTogetherRequest,
    pb.AttendTogetherRequest,
    pb.ExplainRequest,
    pb.ExplainContextRequest,
)


@given(st.sampled_from(REQUESTS), OPTIONS)
def test_both_ways(request_class, options):
    message = request_class()
    put_query_options(message, options)
    assert to_query_options(request_class.FromString(message.SerializeToString())) == options


def test_options_too_long_to_be_kept():
    options = QueryOptions(hints=Hints(rules_off=tuple(f"rule {number}" for number in range(KEPT_BYTES_MAX))))
    for _ in range(2):
        message = pb.AttendRequest()
        put_query_options(message, options)
        assert to_query_options(message) == options


def test_what_is_refused_is_refused_again():
    message = pb.AttendRequest(options=pb.QueryOptions(max_missed_mass=2))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="max_missed_mass"):
            to_query_options(message)


def test_nothing_asked_for_takes_no_bytes():
    for request_class in REQUESTS:
        message = request_class()
        put_query_options(message, QueryOptions())
        assert not message.SerializeToString()


def test_more_tokens_than_the_wire_can_count_are_all():
    message = pb.AttendRequest()
    put_query_options(message, QueryOptions(TopK(1 << 100)))
    assert to_query_options(message) == QueryOptions(TopK(K_MAX))


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
        to_query_options(request_class(options=pb.QueryOptions(retrieval=retrieval)))


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan"), float("inf")])
def test_shares_that_cannot_be(share):
    with pytest.raises(InvalidArgument, match="max_missed_mass"):
        to_query_options(pb.AttendRequest(options=pb.QueryOptions(max_missed_mass=share)))


@pytest.mark.parametrize("bound", [-0.1, 1.5, float("nan"), float("-inf")])
def test_errors_that_cannot_be(bound):
    with pytest.raises(InvalidArgument, match="error_max"):
        to_query_options(pb.AttendRequest(options=pb.QueryOptions(error_max=bound)))


def test_an_error_beside_what_would_override_it():
    both = pb.QueryOptions(error_max=0.1, retrieval=pb.Retrieval(exact=pb.Retrieval.Exact()))
    with pytest.raises(InvalidArgument, match="would win"):
        to_query_options(pb.AttendRequest(options=both))


def test_retrievals_of_another_version_are_refused():
    with pytest.raises(Unsupported, match="one version"):
        to_query_options(pb.AttendRequest(options=pb.QueryOptions(retrieval=pb.Retrieval())))
