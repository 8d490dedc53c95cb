"""Which kernels each operation uses: the fastest of those that were timed on this machine, else those of a table.

The kernels of an operation (`decode`, `prefill`, `scan`, `gather`) differ by the instruction set they are compiled for: dot
products of bfloat16 pairs, float32 vectors of 512 bits, those of 256. The widest is not the fastest on every processor.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import kvdb._native as _native

USES = {
    "decode": "attention of a few rows",
    "prefill": "attention of many rows",
    "scan": "scores of index codes",
    "gather": "keys and values that searches found",
}
"""What each operation does."""

KernelTimes = Mapping[str, Mapping[str, float]]
"""Seconds that an operation took with each instruction set: `times["decode"]["avx2"]`."""

ROUNDS, ROUNDS_MIN, TURN_S = 7, 2, 1e-3
GAIN_MIN = 0.05
"""The share of its time that another instruction set must save; less is noise."""
KNOWN_GAIN_MIN = 0.3
"""The same on a processor that the table has: its row was measured at leisure, while a second of calibration beside other work
has been seen to be wrong by a quarter."""


@dataclass(frozen=True)
class KernelChoice:
    """What one operation uses, and why. speeds: those of all instruction sets that were timed relative to the fastest, which
    has 1; empty where nothing was timed."""

    operation: str
    isa: str
    reason: str
    speeds: Mapping[str, float]


def measure(calls: Mapping[str, Callable[[], object]], budget_s: float) -> KernelTimes:
    """Time one call of each operation with each instruction set it may use, in turns: the least of ROUNDS_MIN to ROUNDS turns, of
    as many as `budget_s` seconds suffice for. The kernels in use are as before when it returns."""
    before, times = _native.kernels(), {operation: dict[str, float]() for operation in calls}
    started = perf_counter()
    try:
        for done in range(ROUNDS + 1):
            if done > ROUNDS_MIN and perf_counter() - started > budget_s:
                break
            for operation, call in calls.items():
                for isa in _native.variants():
                    _native.set_kernels(operation, isa)
                    spent = _least(call)
                    if done:  # the first round warms up
                        times[operation][isa] = min(spent, times[operation].get(isa, spent))
    finally:
        for operation, isa in before.items():
            _native.set_kernels(operation, isa)
    return times


def _least(call: Callable[[], object]) -> float:
    """The least seconds of the calls that TURN_S suffices for, at least one: the first of short ones finds other caches."""
    least, ends = float("inf"), perf_counter() + TURN_S
    while True:
        begin = perf_counter()
        call()
        now = perf_counter()
        least = min(least, now - begin)
        if now >= ends:
            return least


def fastest(times: Mapping[str, float], preferred: str) -> str:
    """The instruction set that took least, or `preferred` if it took hardly more."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < times.get(preferred, float("inf")) * (1 - _gain_min()) else preferred


def _gain_min() -> float:
    return KNOWN_GAIN_MIN if _native.processor_family() else GAIN_MIN


def use(times: KernelTimes) -> None:
    """Let every operation that was timed use its fastest kernels, for the whole process. Times of instruction sets that this
    process does not use, or of operations that it does not know, are passed over."""
    for operation, preferred in _native.kernels().items():
        timed = _possible(times.get(operation, {}))
        if timed:
            _native.set_kernels(operation, fastest(timed, preferred))


def choices(times: KernelTimes) -> list[KernelChoice]:
    """What each operation will use once `use` was called with the same times, and why."""
    return [
        _choice(operation, preferred, _possible(times.get(operation, {}))) for operation, preferred in _native.kernels().items()
    ]


def described(choice: KernelChoice) -> str:
    """The choice in a line, speeds relative to the fastest: `avx512, measured: avx512 1.00, avx2 0.61 of the fastest (...)`."""
    speeds = ", ".join(f"{isa} {speed:.2f}" for isa, speed in choice.speeds.items())
    why = choice.reason + (f": {speeds} of the fastest" if speeds else "")
    return f"{choice.isa}, {why} ({USES[choice.operation]})"


def _choice(operation: str, preferred: str, timed: Mapping[str, float]) -> KernelChoice:
    if not timed:
        return KernelChoice(operation, preferred, _untimed(), {})
    chosen, least = fastest(timed, preferred), min(timed.values())
    speeds = {isa: least / timed[isa] for isa in sorted(timed, key=timed.__getitem__)}
    kept = f"{_untimed()}, as none that was measured saves {_gain_min():.0%} of its time"
    return KernelChoice(operation, chosen, "measured" if timed[chosen] == least else kept, speeds)


def _untimed() -> str:
    if os.environ.get("KVDB_ISA"):
        return "KVDB_ISA"
    family = _native.processor_family()
    return f"the table for {family}" if family else "the best of this processor, which the table does not have"


def _possible(timed: Mapping[str, float]) -> dict[str, float]:
    variants = _native.variants()
    return {isa: seconds for isa, seconds in timed.items() if isa in variants}
