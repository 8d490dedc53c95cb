"""What does a step of eight sessions that search one stored document take in one call, beside a step of one of them?

    python -m benchmarks.sessions [--tokens 131072] [--sessions 8] [--kinds flat clusters hnsw] [--cache DIR]

Sharp heads (`benchmarks/workloads.py`), a literal `Dipr`, a token of each session in one layer, through `db.attend`. In each
round one session takes a step, then all of them take one in one call, then each takes one by itself; each session asks another
query each time. One JSON line a kind: `ratio` is the time of all in one call over that of one, `ratio_each` that of one call
after the other; `error` is of the output of the sessions in one call, relative to exact attention over the same tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

import kvdb
from benchmarks.harness import machine, report
from benchmarks.kinds import KINDS
from benchmarks.workloads import Shape, Workload, generate
from kvdb import _native
from kvdb.config import Config, CpuConfig, IndexConfig
from kvdb.session.state import SessionState
from kvdb.types import Array

WARM_UP, ROUNDS = 8, 48
KINDS_USUAL = ["flat", "clusters", "hnsw"]


def main() -> None:
    given = arguments()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    workload = generate("sharp", Shape(given.tokens), cache=given.cache)
    kv_heads, tokens, head_dim = workload.k.shape
    spec = kvdb.ModelSpec("sessions", 1, len(workload.queries), kv_heads, head_dim, workload.k.dtype.name)
    ids = np.arange(tokens)
    for kind in given.kinds:
        with kvdb.connect(config=quiet(given.threads)) as db:
            db.import_context(spec, ids, [(workload.k, workload.v)], name="document")
            sessions = [db.create_session(spec, ids) for _ in range(given.sessions)]
            name = offer_index(kind, sessions[0], workload, given.cache)
            options = kvdb.QueryOptions(kvdb.Dipr(given.alpha), hints=kvdb.Hints(index=name))
            measured(kind, db, sessions, workload, options, given)


CLOCKS = {"wall": perf_counter, "processor": process_time}


def measured(
    kind: str,
    db: kvdb.Client,
    sessions: list[kvdb.Session],
    workload: Workload,
    options: kvdb.QueryOptions,
    given: argparse.Namespace,
) -> None:
    """One line of one kind."""
    count = len(sessions)
    one, together, each, errors = [], [], [], []
    rng = np.random.default_rng(0)
    clock = CLOCKS[given.clock]
    for number in range(WARM_UP + given.rounds):
        q = np.stack([query(workload, number + i) for i in range(count)])
        k, v = (0.1 * rng.standard_normal((2, count, workload.k.shape[0], 1, workload.k.shape[2]))).astype(workload.k.dtype)
        times = [clock()]
        sessions[number % count].attend(0, q[0], k[0], v[0], options=options)
        times.append(clock())
        out = db.attend(sessions, 0, q, k, v, options=options)
        times.append(clock())
        for i, session in enumerate(sessions):
            session.attend(0, q[i], k[i], v[i], options=options)
        times.append(clock())
        if number < WARM_UP:
            continue
        if number % given.sessions == 0:
            exact = db.attention(sessions, 0, q, options=kvdb.QueryOptions(kvdb.Exact()))
            errors.append(distance(out, exact))
        for taken, begin, end in zip((one, together, each), times, times[1:], strict=False):
            taken.append(end - begin)
    report(
        "sessions",
        kind=kind,
        tokens=workload.k.shape[1],
        sessions=count,
        clock=given.clock,
        threads=_native.threads(),
        alpha=given.alpha,
        one_us=median(one) * 1e6,
        together_us=median(together) * 1e6,
        each_us=median(each) * 1e6,
        ratio=median(together) / median(one),
        ratio_each=median(each) / median(one),
        error=max(errors),
    )


def quiet(threads: int | None) -> Config:
    """A configuration by which nothing is built beside the queries."""
    return Config(cpu=CpuConfig(threads), indexes=IndexConfig(on_demand="", automatic=False))


def offer_index(kind: str, session: kvdb.Session, workload: Workload, cache: Path | None) -> str:
    """Build or load the index of the session's segment, and offer it to every session. Returns its kind."""
    cls, build = KINDS[kind]
    state = session._transport
    assert isinstance(state, SessionState)
    segment = state.snapshot.views[0].segment
    keys = segment.tables[0].keys(len(segment))
    path = None if cache is None else cache / f"{workload.name}-{'x'.join(map(str, workload.k.shape))}-{kind}.index"
    index = cls.load(path, keys) if path is not None and path.exists() else build(keys, workload)
    segment.indexes.put(0, index)
    return str(index.kind)


def query(workload: Workload, number: int) -> Array:
    """`[q_heads, 1, head_dim]` in the workload's dtype."""
    at = number % workload.queries.shape[1]
    return np.ascontiguousarray(workload.queries[:, at : at + 1]).astype(workload.k.dtype)


def distance(out: Array, exact: Array) -> float:
    difference = out.astype(np.float32) - exact.astype(np.float32)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact.astype(np.float32)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--alpha", type=float, default=kvdb.Dipr().alpha)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=KINDS_USUAL)
    parser.add_argument("--threads", type=int, help="of one call (default: those of kvdb)")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="processor: of all threads, for a machine with other work"
    )
    parser.add_argument("--cache", type=Path, help="folder of workloads and indexes that `benchmarks.retrieve --cache` made")
    return parser.parse_args()


if __name__ == "__main__":
    main()
