"""The questions, in the order in which they are asked, each with what it may take on a card."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.results import Results

if TYPE_CHECKING:
    from benchmarks.gpu.card import Card


@dataclass(frozen=True)
class Section:
    """name: of the question, and of its module here. seconds_max: after which it is stopped. compiled: whether it needs kvdb's
    compiled kernels."""

    name: str
    seconds_max: float
    compiled: bool = False

    @property
    def run(self) -> Callable[[Card, Results, int], None]:
        """Imported when it is asked, behind what decides whether Triton interprets."""
        run: Callable[[Card, Results, int], None] = importlib.import_module(f"benchmarks.gpu.{self.name}").run
        return run


SECTIONS = {
    section.name: section
    for section in (
        Section("bandwidth", 40),
        Section("decode", 150),
        Section("shared", 45),
        Section("dipr", 100),
        Section("build", 45),
        Section("formats", 45),
        Section("graph", 45),
        Section("layers", 90, compiled=True),
        Section("model", 90, compiled=True),
        Section("overlap", 120, compiled=True),
    )
}
