"""The card that everything runs on, or the CPU with Triton's interpreter in its place; what is timed on it, and how."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

RESERVE = 2 << 30
"""Bytes of the card that are left free."""
AHEAD_CYCLES = 2_000_000
"""How long the card waits before each timed call, about a millisecond, so that the host is ahead of it and what is timed is the
card's work without gaps."""
WARM_SECONDS = 1.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention that is measured. tokens, long_tokens: the lengths of a usual and of a long context. sink, recent:
    the window that retrieval leaves out. sessions: how many `dipr` and `formats` have. sharing: how many share one segment."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    tokens: int
    long_tokens: int
    batches: tuple[int, ...]
    sessions: int
    sharing: int
    sink: int
    recent: int

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def kv_nbytes(self, tokens: int, element: int = 2) -> int:
        """Bytes of the keys and values of one sequence."""
        return 2 * self.kv_heads * tokens * self.head_dim * element


FULL = Sizes(8, 4, 128, 64, 1 << 17, 1 << 20, (1, 4, 8, 16, 32), 8, 32, 64, 256)
SMALL = Sizes(2, 2, 32, 16, 136, 240, (1, 3), 2, 5, 16, 40)
"""For the interpreter, which runs each program of a launch in turn."""


class Card:
    """small: take small sizes, and no times."""

    def __init__(self, small: bool = False) -> None:
        self._opened = time.monotonic()
        self.interpreted = not torch.cuda.is_available()
        # Triton reads this when it is imported, which nothing has done yet.
        os.environ["TRITON_INTERPRET"] = "1" if self.interpreted else "0"
        self.device = torch.device("cpu" if self.interpreted else "cuda")
        self.small = self.interpreted or small
        self.timed = not self.small
        self.sizes = SMALL if self.small else FULL
        self._flushed: torch.Tensor | None = None
        if self.timed:
            cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 64 << 20)
            self._flushed = torch.empty(4 * cache, dtype=torch.uint8, device=self.device)
            self._warm()

    @property
    def seconds(self) -> float:
        """Since it was opened."""
        return time.monotonic() - self._opened

    def describe(self) -> dict[str, object]:
        """What figures depend on."""
        import triton  # behind what it is told in the beginning

        versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
        found: dict[str, object] = versions | {"cuda": torch.version.cuda}
        if self.interpreted:
            return found | {"card": None, "note": "no card: Triton's interpreter on the CPU, small sizes, no times"}
        properties = torch.cuda.get_device_properties(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return found | {
            "card": properties.name,
            "compute": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "note": "" if self.timed else "small sizes, no times",
        }

    def room_for(self, nbytes: int) -> bool:
        return self.interpreted or nbytes + RESERVE <= torch.cuda.mem_get_info(self.device)[0]

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def wait(self) -> None:
        """Until the card has done all that it was given."""
        if not self.interpreted:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give the card back what torch keeps of what nobody holds any more."""
        self.wait()
        if not self.interpreted:
            torch.cuda.empty_cache()

    def time(self, candidates: Mapping[str, Callable[[], object]], rounds: int = 30, budget_s: float = 3.0) -> dict[str, float]:
        """Median milliseconds of each candidate on the card, by its own events; {} where nothing is timed.

        Every round runs each candidate once, behind something that takes the second-level cache. Rounds end early, but not
        before the fifth, when `budget_s` is spent.
        """
        if not self.timed:
            return {}
        for run in candidates.values():
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
        started = time.perf_counter()
        for done in range(rounds):
            if done >= 5 and time.perf_counter() - started > budget_s:
                break
            for name, run in candidates.items():
                events[name].append(self._once(run))
            torch.cuda.synchronize()
        return {name: median(begin.elapsed_time(end) for begin, end in pairs) for name, pairs in events.items()}

    def wall(self, run: Callable[[], object], calls: int = 200) -> float | None:
        """Median milliseconds of one call as the host sees it, until the card is done; None where nothing is timed."""
        if not self.timed:
            return None
        for _ in range(min(10, calls // 5 + 1)):
            run()
        seconds = []
        for _ in range(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return 1e3 * median(seconds)

    def _once(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert self._flushed is not None
        torch.cuda._sleep(AHEAD_CYCLES)
        self._flushed.zero_()
        begin.record()
        run()
        end.record()
        return begin, end

    def _warm(self) -> None:
        """Until the clocks are up."""
        x = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        started = time.perf_counter()
        while time.perf_counter() - started < WARM_SECONDS:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize()
