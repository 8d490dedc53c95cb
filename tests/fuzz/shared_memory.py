"""Fuzz the rings and the memory that a server shares, as a client that passed the handshake and then writes what it likes.

    python -m tests.fuzz.shared_memory [--seconds 30] [--seed N]

Whatever comes in, each record that the rings carry is answered in time, with an error that says whose fault it is, or the region
ends; another client has right answers meanwhile; and afterwards no region, session or block is left. A finding says its seed and
case.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

import kvdb
import kvdb.errors as errors
from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import (
    ARENA_AT,
    REGION_BYTES,
    CallKind,
    SharedAnswer,
    SharedRequest,
    aligned,
    pack_request,
    unpack_answer,
)
from kvdb.server.serve import Server
from kvdb.types import ModelSpec
from tests.database import database
from tests.waiting import until

SPEC = ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
SECONDS_MAX = 10.0
CASES_OF_A_LANE = 40
PLACES = [0, 1, 63, ARENA_AT - 64, ARENA_AT, ARENA_AT + 1, REGION_BYTES - 64, REGION_BYTES, 1 << 31, 1 << 63, (1 << 64) - 64]
COUNTS = [0, 1, 2, 7, 1 << 20, 1 << 31, 1 << 32, 1 << 61, (1 << 64) - 1]
CHANGES = {
    "generation": [0, 1, (1 << 64) - 1],
    "request": [0, 1, (1 << 64) - 1],
    "number": [0, 1, 1000, (1 << 64) - 1],
    "kind": [*CallKind, 12, 255, (1 << 32) - 1],
    "start": [None, 0, 1, -1, -(1 << 63), (1 << 63) - 1],
    "seconds": [0.0, -1.0, 1e-9, 1e300, float("nan"), float("inf"), float("-inf")],
}
ERRORS = {
    "",
    *(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KvdbError) and kind is not errors.InternalError
    ),
}


Took = Callable[[SharedAnswer | None, str], None]


class Finding(AssertionError):
    """What a server may not do."""


class Fuzzed:
    """A server, a client that writes anything into its region, and one that does not."""

    def __init__(self, server: Server, engine: Database, seed: int) -> None:
        self.seed = seed
        self.cases = 0
        self.answers: dict[str, int] = {}
        self._server = server
        self._engine = engine
        self._honest = kvdb.connect(server.target)
        self._session = self._honest.create_session(SPEC, [1])
        self._q, self._k = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
        for layer in range(SPEC.layers):
            self._session.update(layer, self._k, self._k)
        self._answer = self._ask()
        hello = self._honest._transport._connection.stub.Hello(pb.HelloRequest())
        self._place = hello.local_socket, hello.local_server

    def run(self, cases_max: int, seconds: float) -> None:
        """Try that many cases at most, for that time. Raises Finding."""
        ends = time.monotonic() + seconds
        while self.cases < cases_max and time.monotonic() < ends:
            self._lane()
            if not np.array_equal(self._ask(), self._answer):
                raise Finding(f"seed {self.seed}: another client's answer changed before case {self.cases}")

    def end(self) -> None:
        """Close everything; nothing may be left. Raises Finding."""
        self._session.close()
        self._honest.close()
        until(lambda: not any(lane.alive for lane in self._server._local._lanes))
        for context in self._engine.contexts():
            self._engine.drop(context.name)
        until(lambda: not self._engine.count_sessions())
        self._engine.check_integrity()
        if left := sum(tier.blocks_used for tier in self._engine.tiers()):
            raise Finding(f"seed {self.seed}: {left} blocks are used after all was closed and dropped")

    def _ask(self) -> np.ndarray:
        return self._session.attention(0, self._q, retrieval=kvdb.Exact())

    def _lane(self) -> None:
        """Some cases in a region of their own, which ends in one way or another."""
        first = random.Random(f"{self.seed}:{self.cases}")
        with kvdb.connect(self._server.target) as db, db.create_session(SPEC, [1]) as session:
            lane = SharedLane(*self._place, "")
            try:
                for _ in range(CASES_OF_A_LANE):
                    case = random.Random(f"{self.seed}:{self.cases}")
                    self.cases += 1
                    if not _Case(case, lane, session._transport.id).answered(self._took):
                        break
            finally:
                if first.random() < 0.5:
                    lane.close()
                else:
                    lane._socket.close()  # as one that was killed

    def _took(self, answer: SharedAnswer | None, what: str) -> None:
        """Look at an answer, None for one that did not come. Raises Finding."""
        if answer is None:
            raise Finding(f"seed {self.seed}, case {self.cases - 1}: {what} was not answered")
        if answer.error not in ERRORS:
            raise Finding(f"seed {self.seed}, case {self.cases - 1}: {what} was answered {answer}")
        self.answers[answer.error] = self.answers.get(answer.error, 0) + 1


class _Case:
    """What is sent at once, made from a seed."""

    def __init__(self, rng: random.Random, lane: SharedLane, session: str) -> None:
        self._rng = rng
        self._lane = lane
        self._session = session

    def answered(self, took: Took) -> bool:
        """Send it, and tell of each answer. Whether the region can be used again."""
        rng, lane = self._rng, self._lane
        if rng.random() < 0.05:
            return self._torn()
        records = [self._record() for _ in range(rng.choice([1, 1, 1, 2, 5, 60]))]
        rng.shuffle(records)
        sent = [record for record in records if lane.region.ring.send(record)]
        if rng.random() < 0.3:
            self._scribble()
        for record in sent:
            data = self._receive()
            if data is None and not lane._connected():
                return False
            took(None if data is None else unpack_answer(data), record.hex())
        return True

    def _receive(self) -> bytes | None:
        ends = time.monotonic() + SECONDS_MAX
        while time.monotonic() < ends:
            data: bytes | None = self._lane.region.ring.receive(0.05)
            if data is not None or not self._lane._connected():
                return data
        return None

    def _record(self) -> bytes:
        rng = self._rng
        request = self._right()
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            request = request._replace(**self._change())
        data = bytearray(pack_request(request))
        if rng.random() < 0.1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return rng.randbytes(len(data)) if rng.random() < 0.03 else bytes(data)

    def _right(self) -> SharedRequest:
        """A request that is right, with its message in the region."""
        rng, lane = self._rng, self._lane
        kind, tokens = rng.choice(list(CallKind)), rng.choice([1, 1, 3])
        layer = rng.randrange(SPEC.layers)
        match kind:
            case CallKind.ATTEND_TOGETHER | CallKind.ATTENTION_TOGETHER | CallKind.UPDATE_TOGETHER:
                names = [self._session] * rng.choice([0, 1, 1, 2])
                message = pb.AttendTogetherRequest(session_ids=names, layer=layer).SerializeToString()
            case CallKind.IMPORT_BEGIN:
                spec = pb.ModelSpec(name="tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
                ids = np.arange(tokens, dtype=np.int32).tobytes()
                message = pb.ImportBegin(spec=spec, tokens=ids, name=f"n{rng.randrange(3)}").SerializeToString()
            case _:
                message = pb.AttendRequest(session_id=self._session, layer=layer).SerializeToString()
        if rng.random() < 0.1:
            message = rng.randbytes(rng.randrange(200))
        lane.region.write(ARENA_AT, message)
        size = SPEC.q_heads * tokens * SPEC.head_dim * 4
        q = aligned(ARENA_AT + max(len(message), 1))
        k, v, reply = aligned(q + size), aligned(q + 2 * size), aligned(q + 3 * size)
        return SharedRequest(
            lane.generation, lane.number(), kind, None, tokens, q, k, v, ARENA_AT, len(message), reply, 1 << 16, layer, 5.0
        )

    def _change(self) -> dict[str, float | None]:
        rng = self._rng
        field = rng.choice(SharedRequest._fields)
        if field in {"q", "k", "v", "message", "reply"}:
            choices = [*PLACES, rng.randrange(REGION_BYTES)]
        else:
            choices = CHANGES.get(field, [*COUNTS, rng.randrange(REGION_BYTES)])
        return {field: rng.choice(choices)}

    def _scribble(self) -> None:
        """Change messages and arrays while they may be read."""
        rng, memory = self._rng, self._lane.region.memory
        for _ in range(8):
            at = ARENA_AT + rng.randrange(1 << 12)
            memory[at : at + 16] = rng.randbytes(16)

    def _torn(self) -> bool:
        """Write into the rings themselves, behind which nothing may be expected."""
        rng, memory = self._rng, self._lane.region.memory
        for _ in range(rng.choice([1, 4, 64])):
            at = rng.randrange(ARENA_AT - 8) & ~3
            memory[at : at + 4] = rng.choice([bytes(4), b"\xff" * 4, rng.randbytes(4)])
        self._lane.region.ring.send(self._record())
        with suppress(ValueError):  # what it says itself of a torn ring
            self._lane.region.ring.receive(0.01)
        return False


@contextmanager
def fuzzed(seed: int) -> Iterator[Fuzzed]:
    """A server to be fuzzed; without a finding it is closed, and must be empty then."""
    with database() as engine:
        server = Server(engine, ServerConfig(port=0, local_socket="auto"))
        server.start()
        try:
            run = Fuzzed(server, engine, seed)
            yield run
            run.end()
        finally:
            server.stop(grace=0)


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to make its cases again")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    with fuzzed(seed) as run:
        try:
            run.run(sys.maxsize, arguments.seconds)
        finally:
            print(f"{run.cases} cases: {run.answers}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
