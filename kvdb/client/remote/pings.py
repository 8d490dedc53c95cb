"""How long a server takes to answer nothing, by each way that leads to it."""

from collections.abc import Collection, Mapping
from time import perf_counter

from kvdb.client.remote.connection import Connection
from kvdb.client.remote.shared_memory.lane import seconds_of_ping
from kvdb.rpc import kvdb_pb2 as pb

SHARED_MEMORY, GRPC = WAYS = "shared memory", "gRPC"
WARM_UP = 20


def pings(connection: Connection, count: int, ways: Collection[str] = WAYS) -> Mapping[str, list[float]]:
    """The seconds of `count` pings by each of these ways that is there, one after the other; the way that calls take comes first.
    Raises what a call raises."""
    found = {}
    lane = connection.lanes.take() if SHARED_MEMORY in ways else None
    if lane is not None:
        try:
            found[SHARED_MEMORY] = [seconds_of_ping(lane) for _ in range(WARM_UP + count)][WARM_UP:]
        finally:
            connection.lanes.give_back(lane)
    if GRPC not in ways:
        return found
    found[GRPC] = [_seconds_of_hello(connection) for _ in range(WARM_UP + count)][WARM_UP:]
    return found


def _seconds_of_hello(connection: Connection) -> float:
    started = perf_counter()
    connection.call(pb.HelloRequest())
    return perf_counter() - started
