"""How long should a thread without work spin before it sleeps, for attends so short that waking it counts?

    python -m benchmarks.wake [--tokens 4096 8192 16384] [--spin 0 5 20 50] [--gap 0 50 2000] [--turns 40]

One layer, one query token, bfloat16, 8 KV heads x 4 query heads, head_dim 128. Every turn measures each spin once, in a random
order: a few attends in a row, each after the calling thread was busy with something else for `gap` microseconds, as it is
between two native calls of one layer or between two layers. Beside the medians stands what the whole process took of its
processors for one attend, for spinning is not free.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

import kvdb._native as _native
from benchmarks.harness import machine, report
from indexes.blocks import Blocks

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 4, 128, 64
IN_A_ROW = 25
"""Attends that follow each other with one spin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--spin", type=int, nargs="*", default=[0, 5, 20, 50], help="microseconds")
    parser.add_argument("--gap", type=int, nargs="*", default=[0, 50, 2000], help="microseconds between two attends")
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    before = _native.spin_us()
    try:
        for tokens in given.tokens:
            attend = attends(tokens)
            for gap in given.gap:
                compare(attend, tokens, gap, given.spin, given.turns)
    finally:
        _native.set_spin_us(before)


def attends(tokens: int) -> Callable[[], None]:
    """A call of the kernel over so many tokens."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((KV_HEADS, tokens, HEAD_DIM), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    q = rng.standard_normal((KV_HEADS * GROUP, 1, HEAD_DIM), np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    blocks = Blocks.of(k, v, BLOCK)
    counts = np.full(tokens // BLOCK, BLOCK, np.int32)
    geometry = _native.Geometry(_native.Dtype.bfloat16, KV_HEADS, HEAD_DIM, BLOCK)
    out = np.empty_like(q)
    return lambda: _native.attend(geometry, q, blocks.table, counts, 0, HEAD_DIM**-0.5, out)


def compare(attend: Callable[[], None], tokens: int, gap_us: int, spins: list[int], turns: int) -> None:
    """Reports one line for each spin."""
    taken: dict[int, list[float]] = {spin: [] for spin in spins}
    burnt: dict[int, list[float]] = {spin: [] for spin in spins}
    for _ in range(turns):
        for spin in random.sample(spins, len(spins)):
            _native.set_spin_us(spin)
            attend(), attend()
            processor = time.process_time()
            for _ in range(IN_A_ROW):
                be_busy(gap_us)
                begin = time.perf_counter()
                attend()
                taken[spin].append(time.perf_counter() - begin)
            burnt[spin].append((time.process_time() - processor) / IN_A_ROW)
    for spin in spins:
        report(
            "wake",
            tokens=tokens,
            gap_us=gap_us,
            spin_us=spin,
            attend_us=statistics.median(taken[spin]) * 1e6,
            attend_us_p90=statistics.quantiles(taken[spin], n=10)[-1] * 1e6,
            processor_us=statistics.median(burnt[spin]) * 1e6 - gap_us,
        )


def be_busy(microseconds: int) -> None:
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
