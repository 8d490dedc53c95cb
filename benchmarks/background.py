"""How much does an index that is built in the background slow a session that decodes?

    python -m benchmarks.background [--tokens 32768] [--kind hnsw] [--seconds 8] [--cache DIR]

One layer, its session in a loop without a pause: exact attention, then a range found by a flat index, each first alone and then
beside the build. The build is then given up, and closing the database is timed.
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
from kvdb.database import Database
from kvdb.session import SessionState, Wanted

NAME = "long"
ASKED: dict[str, Retrieval] = {"exact": kvdb.Exact(), "flat": kvdb.Dipr()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--kind", default="hnsw", help="kind of index that is built (default hnsw)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each loop (default 8)")
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads")
    given = parser.parse_args()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    work = generate("sharp", Shape(given.tokens), cache=given.cache)
    database = Database()
    session = opened(database, work)
    database.build_index(NAME, "flat")
    alone = {asked: decode(session, work, ASKED[asked], given.seconds) for asked in ASKED}
    database.build_index(NAME, given.kind, wait=False)
    time.sleep(0.5)  # until it is at work
    beside = {asked: decode(session, work, ASKED[asked], given.seconds) for asked in ASKED}
    done = any(info.kind == given.kind and info.layers == info.layers_total for info in database.indexes(NAME))
    for asked in ASKED:
        report("background", kind=given.kind, asked=asked, tokens=given.tokens, **quantiles(alone[asked], "alone_"))
        report("background", kind=given.kind, asked=asked, tokens=given.tokens, **quantiles(beside[asked], "beside_"))
    started = time.perf_counter()
    database.close()
    report("background", kind=given.kind, tokens=given.tokens, done=done, close_s=time.perf_counter() - started)


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
        session.attention(0, queries[len(taken) % len(queries)], Wanted(asked))
        taken.append(time.perf_counter() - started)
    return np.array(taken)


def quantiles(taken: np.ndarray, prefix: str) -> dict[str, float]:
    named = {"median": 50, "p99": 99, "max": 100}
    return {f"{prefix}steps": len(taken)} | {
        f"{prefix}{name}_ms": 1e3 * float(np.percentile(taken, at)) for name, at in named.items()
    }


if __name__ == "__main__":
    main()
