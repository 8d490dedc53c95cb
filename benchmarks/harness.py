"""What the benchmarks share: fair timing, the machine's description, one JSON line per measurement."""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

SETTLE_SECONDS = 0.02
"""Before each timed call: OpenMP's threads spin for a while after a call of torch, on the cores the next candidate needs."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark's arguments, whose help is the docstring of its file as it stands there."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def measure(candidates: Mapping[str, Callable[[], object]], rounds: int = 7, budget_s: float = 60.0) -> dict[str, float]:
    """Median seconds of each candidate.

    Every round runs each candidate once, so that what else the machine does falls on all alike. A
    first round warms up. Rounds end early, but not before the third, when `budget_s` is spent.
    """
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for done in range(rounds):
            if done >= 3 and time.perf_counter() - start > budget_s:
                break
            for name, run in candidates.items():
                time.sleep(SETTLE_SECONDS)
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
    finally:
        if enabled:
            gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


def per_call(run: Callable[[], object], calls: int = 1000, rounds: int = 7) -> float:
    """Median over rounds of the mean seconds of a call that is too short for the clock."""
    run()
    means = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        means.append((time.perf_counter() - begin) / calls)
    return statistics.median(means)


def machine() -> dict[str, object]:
    """Processor, logical CPUs this process may use, memory, system."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    except OSError:
        pass
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": platform.platform(terse=True),
    }


def report(benchmark: str, **fields: object) -> None:
    """Prints one measurement as a JSON line; floats to four significant digits."""
    short = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps({"benchmark": benchmark, **short}), flush=True)


def huge_pages(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes], 2 MiB-aligned, advised to lie in huge pages, as the block pool does."""
    alignment = 2 << 20
    memory = mmap.mmap(-1, size_bytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    offset = -everything.ctypes.data % alignment
    return everything[offset : offset + size_bytes]
