"""Break the connections of a server's clients at random, while another client compares its answers with the right ones.

    python -m tests.fault.service [--seconds 30] [--seed N]

After each fault the sessions and blocks of the client that was hit are gone, and the engine proves its integrity.
"""

import argparse
import random
import sys
import time
from contextlib import suppress
from threading import Timer

import numpy as np

import kvdb
from kvdb import errors
from kvdb.config import ServerConfig
from kvdb.rpc import options
from kvdb.server.serve import Server
from kvdb.types import ModelSpec
from tests.database import database
from tests.kvdb.server.proxy import Proxy
from tests.waiting import until

SPEC = ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
TOKENS = np.arange(300, dtype=np.int32)
KEEPALIVE_MS = 200
IDLE_SECONDS = 0.5
DELAY_SECONDS_MAX = 0.05
FAULTS = ("reset", "stall")
KEEPALIVES = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}


class Story:
    """A server, a context in it, and what a session over the context answers; rounds: how many faults there were."""

    def __init__(self, engine, server: Server) -> None:
        self.rounds = 0
        self._engine = engine
        self._server = server
        rng = np.random.default_rng(1)
        self._kv = rng.standard_normal((2, SPEC.layers, SPEC.kv_heads, len(TOKENS), SPEC.head_dim)).astype(np.float32)
        self._q = rng.standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
        with self._client() as db:
            db.import_context(SPEC, TOKENS, list(zip(*self._kv, strict=True)), name="doc")
        self._blocks = self._used()
        self._right = self._expected()

    def fault(self, rng: random.Random) -> None:
        """One client works through a proxy that fails at some time. Raises AssertionError and IntegrityError."""
        port = int(self._server.target.rpartition(":")[2])
        with Proxy(port) as proxy:
            timer = Timer(rng.random() * DELAY_SECONDS_MAX, getattr(proxy, rng.choice(FAULTS)))
            with suppress(errors.Unavailable, errors.SessionClosed), kvdb.connect(proxy.target) as db:
                timer.start()
                for _ in range(20):
                    self._work(db, rng)
            timer.cancel()
            timer.join()
        until(self._accounted, f"sessions or blocks are left after round {self.rounds}")
        self.rounds += 1

    def _work(self, db, rng: random.Random) -> None:
        match rng.choice(["decode", "import", "read"]):
            case "decode":
                with db.create_session(SPEC, TOKENS) as session:
                    for _ in range(5):
                        session.attend(0, self._q, self._kv[0, 0][:, :1], self._kv[1, 0][:, :1])
            case "import":
                tokens = np.array([rng.randrange(1 << 20) for _ in range(len(TOKENS))], np.int32)
                name = str(rng.random())
                db.import_context(SPEC, tokens, list(zip(*self._kv, strict=True)), name=name)
            case "read":
                np.testing.assert_array_equal(db.get("doc").read(1)[0], self._kv[0, 1])

    def _accounted(self) -> bool:
        with self._client() as db:
            for context in db.contexts():
                if context.name != "doc":
                    with suppress(errors.NotFound):
                        db.drop(context.name)
            with db.create_session(SPEC, TOKENS) as session:
                np.testing.assert_allclose(
                    session.attention(0, self._q, retrieval=kvdb.Exact()), self._right, rtol=1e-4, atol=1e-5
                )
        handles = self._engine.handles
        if len(handles) or handles._calls or self._used() > self._blocks:
            return False
        self._engine.check_integrity()
        return True

    def _expected(self) -> np.ndarray:
        k, v = (np.repeat(array[0], 2, axis=0).astype(np.float64) for array in self._kv)
        scores = self._q.astype(np.float64) @ k.transpose(0, 2, 1) / np.sqrt(SPEC.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    def _client(self):
        return kvdb.connect(self._server.target)

    def _used(self) -> int:
        return sum(tier.blocks_used for tier in self._engine.tiers())


def run(seconds: float, seed: int, rounds_max: int = sys.maxsize) -> int:
    """The number of faults within that time, every one of them survived."""
    shared = options._SHARED
    options._SHARED = [(name, KEEPALIVE_MS if name in KEEPALIVES else value) for name, value in shared]
    ends, rng = time.monotonic() + seconds, random.Random(seed)
    try:
        with database() as engine:
            server = Server(engine, ServerConfig(port=0, local_socket="", session_idle_seconds=IDLE_SECONDS))
            server.start()
            try:
                story = Story(engine, server)
                while time.monotonic() < ends and story.rounds < rounds_max:
                    story.fault(rng)
                return story.rounds
            finally:
                server.stop(grace=0)
    finally:
        options._SHARED = shared


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    print(f"{run(arguments.seconds, seed)} faults, all accounted for", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
