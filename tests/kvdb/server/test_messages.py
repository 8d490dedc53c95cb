"""Requests over the limit: cut where tokens can be cut, refused with the limit where they cannot."""

import grpc
import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.blend.deviation import SCORES
from kvdb.config import MIB
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import Stub
from tests.reference import attention, relative_error

N = 600  # tokens; their q, k and v are 4.7 MiB, and a request holds 1


@pytest.fixture
def target(serve):
    return serve(message_bytes_max=MIB, request_bytes_max=MIB).target


@pytest.fixture
def spec():
    return kvdb.ModelSpec("wide", layers=2, q_heads=16, kv_heads=8, head_dim=64, dtype="float32")


@pytest.fixture
def kv(spec, make_kv):
    return make_kv(spec, N)


def test_many_tokens_are_sent_in_pieces(client, spec, kv):
    k, v = kv.pairs()[0]
    with client.create_session(spec, kv.tokens) as session, client.create_session(spec, kv.tokens) as other:
        out = session.attend(0, kv.q[0], k, v, start=0)
        assert out.shape == kv.q[0].shape
        other.update(0, k, v, start=0)
        assert (other.attention(0, kv.q[0][:, -5:]) == session.attention(0, kv.q[0][:, -5:])).all()
        assert relative_error(out, attention(kv.q[0], k, v, spec.softmax_scale, new=N)[0]) <= 1e-5


def test_a_piece_that_fails_leaves_those_before_it(client, spec, kv):
    k, v = kv.pairs()[0]
    k[1, N - 1, 3] = np.nan
    with client.create_session(spec, kv.tokens) as session:
        with pytest.raises(errors.NonFiniteError, match="KV head 1"):
            session.update(0, k, v)
        held = session.explain(0)
        with pytest.raises(errors.PositionError) as raised:
            session.update(0, k[:, :1], v[:, :1], start=N)
        kept = int(str(raised.value).split("expected start=")[1].split(",")[0])
        assert 0 < kept < N
        session.update(0, k[:, kept : N - 1], v[:, kept : N - 1], start=kept)
        assert held != session.explain(0)


def test_what_is_wrong_with_many_tokens_is_said_before_any_is_sent(client, spec, kv):
    k, v = kv.pairs()[0]
    cases = [
        (errors.ShapeError, (kv.q[0], k, v[:, 1:])),
        (errors.ShapeError, (kv.q[0][:, 1:], k, v)),
        (errors.ShapeError, (kv.q[0], k[:1], v)),
        (errors.DtypeError, (kv.q[0], k.astype(np.float64), v)),
    ]
    with client.create_session(spec, kv.tokens) as session:
        for error, (q, keys, values) in cases:
            with pytest.raises(error):
                session.attend(0, q, keys, values)
        with pytest.raises(errors.PositionError, match="holds 0 tokens"):
            session.attend(0, kv.q[0], k, v, start=1)
        session.update(0, k[:, :1], v[:, :1], start=0)


def test_queries_cannot_be_cut(client, spec, kv):
    with client.create_session(spec, kv.tokens) as session:
        session.update(0, *kv.pairs()[0])
        with pytest.raises(errors.MessageTooLarge, match=r"q has 2,457,600 bytes; expected at most .*server\.request_bytes_max"):
            session.attention(0, kv.q[0])
        assert session.attention(0, kv.q[0][:, -100:]).shape == (16, 100, 64)


@pytest.fixture
def laid_out(client, kv):
    """A chunk behind a gap of 7 tokens, with all of the gap still to come; and the same in this process."""
    rotating = kvdb.ModelSpec("wide", 2, 16, 8, 64, "float32", kvdb.Rope())
    with kvdb.connect() as embedded:
        for db in (client, embedded):
            db.import_chunk(rotating, kv.tokens, kv.pairs(), name="doc")
        parts = [[5000] * 7, "doc"]
        with client.create_session(rotating, parts=parts) as session, embedded.create_session(rotating, parts=parts) as other:
            yield session, other


def test_what_is_recomputed_is_sent_in_pieces(laid_out, spec, make_kv):
    fresh = make_kv(spec, N + 7, seed=1)
    k, v = fresh.pairs()[0]
    everything = np.arange(N + 7)
    assert k.nbytes > MIB
    answers = []
    for session in laid_out:
        deviations = [session.deviation(0, everything, k, v, score=score) for score in SCORES]
        with pytest.raises(errors.PositionError, match="7 tokens of layer 0 hold nothing yet"):
            session.attention(0, fresh.q[0], positions=everything)
        session.overlay(0, everything, k, v)
        answers.append((deviations, session.attention(0, fresh.q[0], positions=everything), session.explain(0).explain()))
    np.testing.assert_array_equal(answers[0][0], answers[1][0], strict=True)
    assert answers[0][1].dtype == answers[1][1].dtype
    assert relative_error(answers[0][1], answers[1][1]) <= 1e-5
    assert np.isinf(answers[0][0]).tolist() == [[True] * 7 + [False] * N] * len(SCORES)
    assert relative_error(answers[0][1], attention(fresh.q[0], k, v, spec.softmax_scale, new=N + 7)[0]) <= 1e-5


def test_a_piece_of_an_overlay_that_fails_leaves_those_before_it(laid_out, spec, make_kv):
    fresh, everything = make_kv(spec, N + 7, seed=1), np.arange(N + 7)
    k, v = fresh.pairs()[0]
    k[1, N, 3] = np.nan
    session, _ = laid_out
    with pytest.raises(errors.NonFiniteError, match="KV head 1"):
        session.overlay(0, everything, k, v)
    with pytest.raises(errors.PositionError, match="position 0 of layer 0 was recomputed already"):
        session.overlay(0, everything[:1], k[:, :1], v[:, :1])
    session.overlay(0, everything[-1:], k[:, -1:], v[:, -1:])


def test_what_is_wrong_with_many_positions_is_said_before_any_is_sent(laid_out, spec, make_kv):
    fresh, everything = make_kv(spec, N + 7, seed=1), np.arange(N + 7)
    k, v = fresh.pairs()[0]
    session, _ = laid_out
    unsorted = everything.copy()
    unsorted[-2:] = unsorted[-1], unsorted[-2]
    cases = [
        (errors.PositionError, (unsorted, k, v)),
        (errors.PositionError, (everything + 1, k, v)),
        (errors.ShapeError, (everything[1:], k, v)),
        (errors.ShapeError, (everything, k, v[:, 1:])),
        (errors.DtypeError, (everything, k.astype(np.float64), v)),
    ]
    for error, arguments in cases:
        for call in (session.overlay, session.deviation):
            with pytest.raises(error):
                call(0, *arguments)
    assert np.isinf(session.deviation(0, everything[:8], k[:, :8], v[:, :8])).tolist() == [True] * 7 + [False]


def test_a_prompt_of_too_many_tokens(client, spec):
    ids = np.zeros(300_000, np.int32)
    with pytest.raises(errors.MessageTooLarge, match="the list of parts has 1,200,"):
        client.create_session(spec, parts=[ids[:150_000], ids[150_000:]])
    for call in (
        lambda: client.create_session(spec, ids),
        lambda: client.import_context(spec, ids, [], name="doc"),
    ):
        with pytest.raises(errors.MessageTooLarge, match="the list of tokens has 1,200,000 bytes"):
            call()


def test_one_token_that_is_too_large(serve):
    wide = kvdb.ModelSpec("wide", 1, 2048, 2048, 256, "float32")
    k = np.zeros((2048, 1, 256), np.float32)
    with kvdb.connect(serve(message_bytes_max=MIB, request_bytes_max=MIB).target) as db:
        with db.create_session(wide, [1]) as session, pytest.raises(errors.MessageTooLarge, match="one token"):
            session.update(0, k, k)
        with pytest.raises(errors.MessageTooLarge, match="one token"):
            db.import_context(wide, [1], [(k, k)], name="doc")


def test_the_server_keeps_its_limit_itself(target, spec):
    """A client that does not look is refused by the server, and its session stays as it was."""
    k = codec.to_array(np.ones((8, N, 64), np.float32))
    with grpc.insecure_channel(target.removeprefix("kvdb://")) as channel:
        stub = Stub(channel)
        session = stub.CreateSession(pb.CreateSessionRequest(spec=codec.to_spec(spec), tokens=b"")).session_id
        with pytest.raises(grpc.RpcError) as raised:
            stub.Update(pb.UpdateRequest(session_id=session, layer=0, k=k, v=k))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Stats(pb.StatsRequest(session_id=session)).tail_tokens == 0


def test_what_older_clients_ask_is_still_answered(client, stub, spec, make_kv):
    """Whether indexes match their keys was a call of its own; renaming is said as before."""
    kv = make_kv(spec, 2100)
    client.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    client.build_index("doc", "flat")
    assert stub.VerifyIndexes(pb.VerifyIndexesRequest(name="doc")).indexes == client.verify("doc").indexes == spec.layers
    both = pb.UpdateContextRequest(name="doc", new_name="new", pinned=True)
    renamed = stub.UpdateContext(both)
    assert (renamed.name, renamed.pinned) == ("new", True)
    assert stub.UpdateContext(pb.UpdateContextRequest(name="new", new_name="doc")).name == "doc"
    assert list(stub.DropContexts(pb.DropContextsRequest(names=pb.Names(names=["doc"]))).dropped) == ["doc"]
