"""An import that does not end with a commit leaves nothing behind, however it ends."""

import subprocess
import sys
import textwrap

import grpc
import numpy as np
import pytest

from kvdb import errors
from kvdb.client.remote.database import RemoteDatabase
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.status import ERROR_KEY

NAME = "doc"


@pytest.fixture
def kv(spec, make_kv):
    return make_kv(spec, 3000)


@pytest.fixture
def nothing_left(engine, blocks_used, eventually):
    """Checks that no block is in use, soon."""

    def check():
        eventually(lambda: not blocks_used())
        engine.check_integrity()
        assert engine.contexts() == []

    return check


def requests(kv, *steps):
    """Messages of an import in the generated classes, as another client would send them."""
    for step in steps:
        if step == "begin":
            begin = pb.ImportBegin(spec=codec.to_spec(kv.spec), tokens=codec.to_tokens(kv.tokens), name=NAME)
            yield pb.ImportRequest(begin=begin)
        elif step == "commit":
            yield pb.ImportRequest(commit=pb.ImportCommit())
        else:
            k, v = kv.pairs()[step]
            head = pb.KvChunk(layer=step, dtype=kv.spec.dtype, shape=k.shape)
            yield pb.ImportRequest(chunk=head, data=k.tobytes() + v.tobytes())


def test_another_client_can_import(stub, engine, kv):
    begun, committed = stub.ImportContext(requests(kv, "begin", 1, 0, "commit"))
    assert begun.begun.start == 0
    assert codec.from_info(committed.committed) == engine.get(NAME)


def test_a_killed_client_leaves_nothing(target, blocks_used, eventually, nothing_left):
    """A real process, killed in the midst of a layer."""
    script = f"""
        import sys, numpy as np, kvdb
        spec = kvdb.ModelSpec("tiny", 2, 4, 2, 16, "float32")
        k = np.ones((2, 20000, 16), np.float32)
        def layers():
            yield k, k
            print("half", flush=True)
            sys.stdin.read()
        kvdb.connect({target!r}).import_context(spec, range(20000), layers(), name="doc")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "half\n"
            eventually(blocks_used)
        finally:
            process.kill()
    nothing_left()


def test_a_cancelled_call_leaves_nothing(stub, blocks_used, kv, eventually, nothing_left):
    def never_committed():
        yield from requests(kv, "begin", 0)
        eventually(lambda: not call.is_active())

    call = stub.ImportContext(never_committed())
    next(call)
    eventually(blocks_used)
    call.cancel()
    nothing_left()


def test_a_call_that_just_ends_leaves_nothing(stub, kv, nothing_left):
    replies = list(stub.ImportContext(requests(kv, "begin", 0, 1)))
    assert [reply.WhichOneof("step") for reply in replies] == ["begun"]
    nothing_left()


def test_an_abort_is_done_when_it_returns(target, blocks_used, kv):
    database = RemoteDatabase(target)
    writing = database.begin_import(kv.spec, kv.tokens, NAME)
    writing.write(0, *kv.pairs()[0])
    writing.abort()
    writing.abort()
    assert not blocks_used()
    for late in (writing.commit, lambda: writing.write(0, *kv.pairs()[0])):
        with pytest.raises(errors.SessionClosed, match="begin another"):
            late()
    database.close()


def test_an_error_on_the_client_leaves_nothing(client, kv, nothing_left):
    def breaks():
        yield kv.pairs()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.import_context(kv.spec, kv.tokens, breaks(), name=NAME)
    nothing_left()


def test_poison_in_a_chunk_ends_the_import_while_it_is_being_sent(client, kv, nothing_left):
    kv.k[0, 1, 7] = np.nan
    with pytest.raises(errors.NonFiniteError, match="KV head 1, token 7"):
        client.import_context(kv.spec, kv.tokens, iter(kv.pairs()), name=NAME)
    nothing_left()


WRONG_ORDERS = {
    "nothing at all": [],
    "a chunk first": [0],
    "a commit first": ["commit"],
    "begin twice": ["begin", "begin"],
}


@pytest.mark.parametrize("steps", WRONG_ORDERS.values(), ids=list(WRONG_ORDERS))
def test_steps_out_of_order(stub, kv, steps, nothing_left):
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.ImportContext(requests(kv, *steps)))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "begin, chunks, then commit" in raised.value.details()
    nothing_left()


def test_a_commit_too_early(stub, kv, nothing_left):
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.ImportContext(requests(kv, "begin", 0, "commit")))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (ERROR_KEY, "PositionError") in raised.value.trailing_metadata()
    nothing_left()


def test_what_is_stored_is_not_sent(target, engine, kv):
    database = RemoteDatabase(target)
    for name in ("first", "second"):
        writing = database.begin_import(kv.spec, kv.tokens, name)
        assert writing.start == (0 if name == "first" else len(kv.tokens))
        if name == "first":
            for layer, (k, v) in enumerate(kv.pairs()):
                writing.write(layer, k, v)
        assert writing.commit() == engine.get(name)
    database.close()
