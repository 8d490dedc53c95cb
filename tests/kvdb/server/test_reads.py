"""A client that reads KV back, and then does not: the server holds little for it, and nothing when it is gone."""

from pathlib import Path
from time import sleep
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

import kvdb
from kvdb.config import MIB
from kvdb.rpc import kv_chunk
from kvdb.rpc import kvdb_pb2 as pb

SPEC = kvdb.ModelSpec("wide", layers=4, q_heads=2, kv_heads=2, head_dim=128, dtype="float32")
TOKENS = 2048
"""Four MiB a layer."""
SLOW_BYTES_MAX = 8 * MIB
"""What a server may take for a reader that does not read: a thread, a chunk, its message, and what gRPC has taken of it."""


@pytest.fixture
def stored(engine, make_kv):
    """A context of 16 MiB."""
    kv = make_kv(SPEC, TOKENS)
    with_client = kvdb.client.client.Client(engine)
    with_client.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
    return kv


def request(**source):
    return pb.ReadContextRequest(**{"context": "doc", "layers": range(SPEC.layers), "start": 0, "stop": TOKENS, **source})


def test_it_comes_in_chunks_of_about_a_mib_in_order(stub, stored):
    chunks = [kv_chunk.deserialize(reply.SerializeToString()) for reply in stub.ReadContext(request())]
    assert max(chunk.k.nbytes + chunk.v.nbytes for chunk in chunks) <= MIB
    assert len(chunks) == 16
    assert [chunk.layer for chunk in chunks] == sorted(chunk.layer for chunk in chunks)
    assert np.array_equal(np.concatenate([chunk.k for chunk in chunks if chunk.layer == 3], axis=1), stored.k[3])


def test_a_client_that_leaves_in_the_middle_leaves_nothing(engine, serve, stub_of, stored, eventually):
    server = serve()
    call = stub_of(server).ReadContext(request())
    next(call)
    call.cancel()
    eventually(lambda: not len(engine.handles))


def test_one_that_stops_reading_is_ended(engine, serve, stub_of, stored, eventually):
    """gRPC takes what fits into its windows, and the server holds the next chunk alone until the stream is idle for too long."""
    server = serve(stream_idle_seconds=0.2)
    call = stub_of(server).ReadContext(request(layers=list(range(SPEC.layers)) * 64))
    next(call)
    eventually(lambda: not len(engine.handles))
    with pytest.raises(grpc.RpcError) as failure:
        list(call)
    assert failure.value.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


def test_slow_readers_take_little_of_the_servers_memory(process, stub_of, make_kv):
    """Each asks for a GiB, and takes one message of it."""
    kv, readers = make_kv(SPEC, TOKENS), 6

    def held():
        (line,) = (line for line in Path(f"/proc/{running.pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10

    with process() as (running, line):
        target = line.split()[-1]
        with kvdb.connect(target) as db:
            db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc").read(range(SPEC.layers))
        before = held()
        calls = [
            stub_of(SimpleNamespace(target=target)).ReadContext(request(layers=list(range(SPEC.layers)) * 64))
            for _ in range(readers)
        ]
        for call in calls:
            next(call)
        sleep(0.5)  # in which a server that did not wait for them would read on
        assert held() - before < readers * SLOW_BYTES_MAX
        for call in calls:
            call.cancel()


def test_requests_that_cannot_be(stub, stored):
    for wrong, status in (
        ({"context": "none"}, grpc.StatusCode.NOT_FOUND),
        ({"context": None}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"context": None, "session_id": "none"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"layers": [4]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stop": TOKENS + 1}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"start": 9, "stop": 8}, grpc.StatusCode.FAILED_PRECONDITION),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            list(stub.ReadContext(request(**wrong)))
        assert (wrong, failure.value.code()) == (wrong, status)
