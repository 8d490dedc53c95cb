"""How soon does a server answer after a restart, and how much later over a context on disk than over one in memory?

    python -m benchmarks.restart [--contexts 100] [--tokens 2048] [--long 16384] [--rounds 5]

A store of many contexts and a long one, all with an index, is opened again and again: the seconds until it is open, until the
first query over a short context is answered, and until all indexes of the long one are back, none of which is built. Then the
first token over the long context: the last tokens of a prompt go through all layers, each with the products of a layer of the
model, from memory and from disk in turns. 8 layers of 8 KV heads x 4 query heads, head_dim 128, bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database

SPEC = kvdb.ModelSpec("restart", layers=8, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", rope=kvdb.Rope())
PROMPT = 16
"""The tokens of a prompt behind the context."""
WIDTH, INNER = 4096, 14336
"""The model's width, and that of its MLP: an 8B model's, of which this has a quarter of the layers."""
KIND = "flat"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the store is made (default: the folder of temporary files)")
    given = parser.parse_args()
    report("machine", **machine())
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        config = Config(
            storage=StorageConfig(path=folder), indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=2048)
        )
        with Database(config) as database:
            for number in range(given.contexts):
                put(database, ids(number, given.tokens), f"c{number}")
            put(database, ids(given.contexts, given.long), "long")
            database.build_index("long", KIND)
        restarts(config, given)
        first_tokens(config, given)


def ids(number: int, tokens: int) -> np.ndarray:
    return np.r_[number, np.arange(1, tokens)].astype(np.int32)


def put(database: Database, tokens: np.ndarray, name: str) -> None:
    """Import a context of random keys and values, the same for each layer."""
    rng = np.random.default_rng(0)
    shape = SPEC.kv_heads, len(tokens), SPEC.head_dim
    k, v = (rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    writing = database.begin_import(SPEC, tokens, name)
    for layer in range(SPEC.layers):
        writing.write(layer, k[:, writing.start :], v[:, writing.start :])
    writing.commit()


def query(tokens: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.standard_normal((SPEC.q_heads, tokens, SPEC.head_dim), np.float32).astype(ml_dtypes.bfloat16)


def restarts(config: Config, given: argparse.Namespace) -> None:
    """Open the store again and again."""
    opened, answered, indexed = [], [], []
    q = query(1)
    for round_ in range(given.rounds):
        begin = time.perf_counter()
        with Database(config) as database:
            opened.append(time.perf_counter() - begin)
            session = database.create_session(SPEC, ids(round_ % given.contexts, given.tokens))
            session.attention(0, q, kvdb.QueryOptions(kvdb.Exact()))
            answered.append(time.perf_counter() - begin)
            session.close()
            begin = time.perf_counter()
            session = database.create_session(SPEC, ids(given.contexts, given.long))
            database.wait_for_builds()
            indexed.append(time.perf_counter() - begin)
            (info,) = database.indexes("long")
            assert (info.state, info.layers) == ("ready", SPEC.layers), "the indexes are back"
            session.close()
    seconds = {"opened_s": opened, "first_query_s": answered, "indexes_back_s": indexed}
    report("restart", contexts=given.contexts, tokens=given.tokens, **{name: statistics.median(s) for name, s in seconds.items()})


def first_tokens(config: Config, given: argparse.Namespace) -> None:
    """The first token over the long context, from memory and from disk in turns."""
    rng = np.random.default_rng(2)
    weights = [rng.standard_normal((WIDTH, 2 * WIDTH + 3 * INNER), np.float32) / 64]
    hidden = rng.standard_normal((PROMPT, WIDTH), np.float32)
    q, kv = query(PROMPT), query(PROMPT)[: SPEC.kv_heads]
    tokens = ids(given.contexts, given.long)

    def first_token(database: Database) -> float:
        begin = time.perf_counter()
        session = database.create_session(SPEC, tokens)
        for layer in range(SPEC.layers):
            hidden @ weights[0]  # the products of a layer of the model
            session.attend(layer, q, kv, kv, kvdb.QueryOptions())
        seconds = time.perf_counter() - begin
        session.close()
        return seconds

    with Database(config) as database:
        first_token(database)
        memory, disk = [], []
        for _ in range(given.rounds):
            memory.append(first_token(database))
            database.wait_for_builds()
            database.offload("long")
            disk.append(first_token(database))
            database.wait_for_builds()
    later = statistics.median(d / m for d, m in zip(disk, memory, strict=True))
    report("first token", long=given.long, memory_s=statistics.median(memory), disk_s=statistics.median(disk), later=later)


if __name__ == "__main__":
    main()
