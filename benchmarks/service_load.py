"""How does the service stand up to many at once? One JSON line a measurement; servers and clients are processes of their own.

    python -m benchmarks.service_load [--tokens 4096] [--seconds 5] [--rounds 40]

`load.open`: attends of one token arrive at random (Poisson), at shares of the rate that closed loops of as many workers reach,
whether or not the server has answered those before. What an attend takes is counted from when it was to begin, so that a server
that falls behind cannot hide it (HDR histogram, three digits).
`load.sessions`: 64 sessions over 8 shared contexts take a step of one token each: `apart`, one call after the other; `together`,
in one call; `at once`, by so many threads of several processes. ratio: steps a second beside `apart`. p99_over_p50: of the
session where it is largest.

The transports are a server that shares memory with its clients, and one that answers over gRPC alone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from benchmarks.service import SPEC, keys_values, random
from benchmarks.service_process import server
from kvdb.types import Array

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

CONTEXTS, SESSIONS = 8, 64
PROCESSES, WORKERS = 2, 4
SHARES = (0.3, 0.6, 0.8)
LOWEST_US, HIGHEST_US, DIGITS = 1, 60_000_000, 3
RATIO_MIN, SPREAD_MAX = 4.0, 5.0
WARM_UP = 20
TRANSPORTS = {"shared": "auto", "grpc": ""}


class Load(NamedTuple):
    """What one process of clients is to do. sessions: how many it opens, each with a thread of its own. rate: attends a second
    to begin, 0 for one after the other. steps: how many each session takes at most, 0 for as many as come in `seconds`."""

    target: str
    tokens: int
    sessions: int
    seconds: float = 0.0
    rate: float = 0.0
    steps: int = 0
    seed: int = 0


class Taken(NamedTuple):
    """What came of it: histograms of microseconds, one for each session, encoded; and the seconds of it all."""

    histograms: list[bytes]
    seconds: float


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each context")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate of arrivals; 0 for none")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each session")
    given = parser.parse_args()
    report("machine", **machine())
    for transport, socket in TRANSPORTS.items():
        with server(socket) as target, kvdb.connect(target) as db, stored(db, given.tokens):
            if given.seconds:
                open_loop(transport, target, given.tokens, given.seconds)
            many_sessions(transport, target, db, given.tokens, given.rounds)


@contextmanager
def stored(db: kvdb.Client, tokens: int) -> Iterator[None]:
    """The contexts, until the body ends."""
    with ExitStack() as stack:
        for number in range(CONTEXTS):
            kv = keys_values(tokens, number)
            stack.callback(db.import_context(SPEC, ids_of(number, tokens), [kv], name=f"load-{number}").drop)
        yield


def ids_of(context: int, tokens: int) -> Array:
    return np.arange(tokens, dtype=np.int32) + context * tokens


def token(seed: int) -> tuple[Array, Array, Array]:
    """q, k and v of one token."""
    return random(SPEC.q_heads, 1, seed), random(SPEC.kv_heads, 1, seed + 1), random(SPEC.kv_heads, 1, seed + 2)


def open_loop(transport: str, target: str, tokens: int, seconds: float) -> None:
    closed = in_processes([Load(target, tokens, WORKERS, seconds, seed=n) for n in range(PROCESSES)])
    capacity = sum(histogram.get_total_count() for histogram in closed.each) / closed.seconds
    for share in SHARES:
        rate = share * capacity / PROCESSES
        taken = in_processes([Load(target, tokens, WORKERS, seconds, rate, seed=n) for n in range(PROCESSES)])
        whole = merged(taken.each)
        report(
            "load.open",
            transport=transport,
            context_tokens=tokens,
            capacity_per_s=capacity,
            share=share,
            per_s=whole.get_total_count() / taken.seconds,
            **{f"p{p:g}_us".replace(".", "_"): whole.get_value_at_percentile(p) for p in (50, 90, 99, 99.9)},
        )


def many_sessions(transport: str, target: str, db: kvdb.Client, tokens: int, rounds: int) -> None:
    """The ways take turns, round by round, but for `at once`, whose clients are processes of their own."""
    arrays = [token(number) for number in range(SESSIONS)]
    stacked = [np.stack(each) for each in zip(*arrays, strict=True)]
    with ExitStack() as stack:
        sessions = [stack.enter_context(db.create_session(SPEC, ids_of(n % CONTEXTS, tokens))) for n in range(SESSIONS)]
        each = {way: [histogram() for _ in sessions] for way in ("apart", "together")}
        spent = dict.fromkeys(each, 0.0)
        for number in range(WARM_UP + rounds):
            began = perf_counter()
            for session, own, (q, k, v) in zip(sessions, each["apart"], arrays, strict=True):
                own.record_value(us_of(lambda s=session, q=q, k=k, v=v: s.attend(0, q, k, v)))  # type: ignore[misc]
            middle = perf_counter()
            us = us_of(lambda: db.attend(sessions, 0, *stacked))
            for own in each["together"]:
                own.record_value(us)
            if number < WARM_UP:
                for own in (*each["apart"], *each["together"]):
                    own.reset()
                continue
            spent["apart"] += middle - began
            spent["together"] += perf_counter() - middle
    apart = SESSIONS * rounds / spent["apart"]
    for way, histograms in each.items():
        told(transport, tokens, way, histograms, SESSIONS * rounds / spent[way], apart)
    loads = [Load(target, tokens, SESSIONS // PROCESSES, steps=rounds, seed=n) for n in range(PROCESSES)]
    taken = in_processes(loads)
    told(transport, tokens, "at once", taken.each, SESSIONS * rounds / taken.seconds, apart)


def told(transport: str, tokens: int, way: str, each: list[HdrHistogram], rate: float, apart: float) -> None:
    spreads = [one.get_value_at_percentile(99) / one.get_value_at_percentile(50) for one in each]
    whole = merged(each)
    report(
        "load.sessions",
        transport=transport,
        context_tokens=tokens,
        way=way,
        sessions=SESSIONS,
        contexts=CONTEXTS,
        steps_per_s=rate,
        ratio=rate / apart,
        p50_us=whole.get_value_at_percentile(50),
        p99_us=whole.get_value_at_percentile(99),
        p99_over_p50=max(spreads),
        ratio_min=RATIO_MIN if way != "apart" else None,
        p99_over_p50_max=SPREAD_MAX,
    )


class Results(NamedTuple):
    """each: a histogram for each session. seconds: of the process that took longest."""

    each: list[HdrHistogram]
    seconds: float


def in_processes(loads: list[Load]) -> Results:
    """Each load by a process of its own, all at a time."""
    with ProcessPoolExecutor(len(loads), multiprocessing.get_context("spawn")) as pool:
        taken = list(pool.map(carry_out, loads))
    each = [histogram().decode(encoded) for one in taken for encoded in one.histograms]
    return Results(each, max(one.seconds for one in taken))


def carry_out(load: Load) -> Taken:
    """Every thread has a session; with a rate, each takes the next arrival that nobody has taken."""
    with ExitStack() as stack:
        db = stack.enter_context(kvdb.connect(load.target))
        sessions = [
            stack.enter_context(db.create_session(SPEC, ids_of((load.seed + n) % CONTEXTS, load.tokens)))
            for n in range(load.sessions)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(load.sessions))
        for session in sessions:
            for _ in range(WARM_UP):
                session.attend(0, *token(0))
        began = perf_counter()
        next_one = arrivals(load, began)
        done: list[Future[HdrHistogram]] = [
            threads.submit(steps, load, session, load.seed + 100 * n, began, next_one) for n, session in enumerate(sessions)
        ]
        histograms = [one.result().encode() for one in done]
        return Taken(histograms, perf_counter() - began)


def arrivals(load: Load, began: float) -> Callable[[], float | None]:
    """Gives the times at which attends are to begin, None behind the last. Threads may share it."""
    if not load.rate:
        return lambda: 0.0
    gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, int(2 * load.rate * load.seconds) + 16)
    times = began + np.cumsum(gaps)
    numbers, last = count(), int((times < began + load.seconds).sum())
    return lambda: float(times[n]) if (n := next(numbers)) < last else None


def steps(load: Load, session: kvdb.Session, seed: int, began: float, next_one: Callable[[], float | None]) -> HdrHistogram:
    """The attends of one thread, in microseconds from when each was to begin."""
    own, (q, k, v), end = histogram(), token(seed), began + load.seconds
    taken = 0
    while (due := next_one()) is not None and (taken < load.steps if load.steps else perf_counter() < end or load.rate):
        if (early := due - perf_counter()) > 0:
            sleep(early)
        start = due or perf_counter()
        session.attend(0, q, k, v)
        own.record_value(max(LOWEST_US, round((perf_counter() - start) * 1e6)))
        taken += 1
    return own


def us_of(call: Callable[[], object]) -> int:
    began = perf_counter()
    call()
    return max(LOWEST_US, round((perf_counter() - began) * 1e6))


def histogram() -> HdrHistogram:
    from hdrh.histogram import HdrHistogram  # of the extra bench, which --help does without

    return HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)


def merged(each: list[HdrHistogram]) -> HdrHistogram:
    whole = histogram()
    for one in each:
        whole.add(one)
    return whole


if __name__ == "__main__":
    main()
