"""A process that asks a session whose context does not fit into memory, and says which answers were right and which refused.

python -m tests.fault.paged_session

One is forked for each line that comes in: FIFO GO FOLDER. It asks when the FIFO `GO` was opened and closed, and once more when it
was again.
"""

import logging
from pathlib import Path

import numpy as np

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import Unavailable
from tests.fault.processes import fork_for_each_line, say

SPEC = kvdb.ModelSpec("paged", layers=4, q_heads=4, kv_heads=2, head_dim=32, dtype="float32", rope=kvdb.Rope())
TOKENS, ROUNDS = 2048, 3
CPU_BYTES_MAX = 5 * TOKENS * SPEC.token_nbytes // 2
"""Room for two of the four layers, and for the session's own tokens."""
_rng = np.random.default_rng(17)
KV = _rng.standard_normal((2, SPEC.layers, SPEC.kv_heads, TOKENS, SPEC.head_dim), np.float32)
NEW = _rng.standard_normal((2, SPEC.layers, SPEC.kv_heads, 1, SPEC.head_dim), np.float32)
QUERY = _rng.standard_normal((SPEC.q_heads, 1, SPEC.head_dim), np.float32)


def opened(folder, cpu_bytes_max=None):
    """The engine of a store."""
    storage = StorageConfig(arena_bytes=1 << 20, path=str(folder), cpu_bytes_max=cpu_bytes_max)
    return Database(Config(storage=storage, indexes=IndexConfig(automatic=False, on_demand="")))


def fill(folder):
    """Store the context. Returns what each layer answers when all of it is in memory, and what it does one token later."""
    with opened(folder) as engine:
        db = Client(engine)
        db.import_context(SPEC, np.arange(TOKENS), list(zip(*KV, strict=True)), name="doc")
        with db.create_session(SPEC, np.arange(TOKENS)) as session:
            asked = [answer(session, layer) for layer in range(SPEC.layers)]
            return asked, [decoded(session, layer) for layer in range(SPEC.layers)]


def answer(session, layer):
    return session.attention(layer, QUERY, retrieval=kvdb.Exact())


def decoded(session, layer):
    return session.attend(layer, QUERY, *(x[layer] for x in NEW), retrieval=kvdb.Exact())


def use(go, folder):
    """Ask while reads may fail, and once more when none does."""
    right, later = np.load(Path(folder).with_name("right.npy"))
    with opened(folder, CPU_BYTES_MAX) as engine:
        db = Client(engine)
        with db.create_session(SPEC, np.arange(TOKENS)) as session:
            say("opened")
            Path(go).read_bytes()
            for layer in ROUNDS * [*range(SPEC.layers)]:
                try:
                    say("right" if np.array_equal(answer(session, layer), right[layer]) else "wrong")
                except Unavailable as error:
                    say("refused" if "cannot be read" in str(error) else f"untold {error}")
            say("asked")
            Path(go).read_bytes()
            again = [answer(session, layer) for layer in range(SPEC.layers)]
            step = [decoded(session, layer) for layer in range(SPEC.layers)]
            say("good" if np.array_equal(again, right) and np.array_equal(step, later) else "bad")
        with db.create_session(SPEC, np.arange(TOKENS)) as session:
            again = [answer(session, layer) for layer in range(SPEC.layers)]
            say("good" if session.reused == TOKENS and np.array_equal(again, right) else "bad")
        engine.check_integrity()
    say("closed")


def main():
    logging.getLogger("kvdb").setLevel(logging.CRITICAL)
    fork_for_each_line(use)


if __name__ == "__main__":
    main()
