"""How much does an index that is built in the background slow a session that decodes?

    python -m benchmarks.background [--tokens 32768] [--kind hnsw] [--seconds 3] [--cache DIR]

One layer and a session in a loop without a pause: exact attention, then a range found by a flat index, each alone and beside a
build over the same keys in a second database, in turns. That database is closed in the middle of the build, which is timed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import indexes._native as _native
import kvdb
from benchmarks.harness import machine, report
from benchmarks.workloads import Shape, Workload, generate
from indexes.retrieval import Retrieval
from kvdb.config import Config, IndexConfig
from kvdb.database import Database
from kvdb.session.state import QueryOptions, SessionState

NAME = "long"
MANUAL = Config(indexes=IndexConfig(on_demand="", automatic=False))
ASKED: dict[str, Retrieval] = {"exact": kvdb.Exact(), "flat": kvdb.Dipr()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--kind", default="hnsw", help="kind of index that is built (default hnsw)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each loop (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all loops are run (default 3)")
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads")
    given = parser.parse_args()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    work = generate("sharp", Shape(given.tokens), cache=given.cache)
    with Database(MANUAL) as database:
        session = opened(database, work)
        database.build_index(NAME, "flat")
        taken: dict[str, list[np.ndarray]] = {}
        closing = []
        for _ in range(given.rounds):
            for name, asked in ASKED.items():
                taken.setdefault(f"{name} alone", []).append(decode(session, work, asked, given.seconds))
            builder = Database(MANUAL)
            opened(builder, work)
            builder.build_index(NAME, given.kind, wait=False)
            time.sleep(0.5)  # until it is at work
            for name, asked in ASKED.items():
                taken.setdefault(f"{name} beside", []).append(decode(session, work, asked, given.seconds))
            done = any(info.layers == info.layers_total for info in builder.indexes(NAME))
            started = time.perf_counter()
            builder.close()
            closing.append(time.perf_counter() - started)
    for name, steps in taken.items():
        report("background", kind=given.kind, tokens=given.tokens, steps=name, **quantiles(np.concatenate(steps)))
    report("background", kind=given.kind, tokens=given.tokens, build_ended=done, close_s=max(closing))


def opened(database: Database, work: Workload) -> SessionState:
    heads, n, head_dim = work.k.shape
    spec = kvdb.ModelSpec("benchmark", 1, len(work.queries), heads, head_dim, work.k.dtype.name)
    ids = np.arange(n, dtype=np.int32)
    writing = database.begin_import(spec, ids, NAME)
    writing.write(0, np.asarray(work.k), np.asarray(work.v))
    writing.commit()
    session = database.create_session(spec, ids)
    session.update(0, *(np.asarray(x[:, :1]) for x in (work.k, work.v)))  # the token that asks
    return session


def decode(session: SessionState, work: Workload, asked: Retrieval, seconds: float) -> np.ndarray:
    """Seconds of each step of the loop, float64 `[steps]`."""
    queries = [np.ascontiguousarray(work.queries[:, i : i + 1]).astype(work.k.dtype) for i in range(work.queries.shape[1])]
    taken: list[float] = []
    ended = time.perf_counter() + seconds
    while (started := time.perf_counter()) < ended:
        session.attention(0, queries[len(taken) % len(queries)], QueryOptions(asked))
        taken.append(time.perf_counter() - started)
    return np.array(taken)


def quantiles(taken: np.ndarray) -> dict[str, float]:
    named = {"median_ms": 50, "p99_ms": 99, "max_ms": 100}
    return {"count": len(taken), **{name: 1e3 * float(np.percentile(taken, at)) for name, at in named.items()}}


if __name__ == "__main__":
    main()
