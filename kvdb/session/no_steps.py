"""The runner of what is kept and not attended, such as the keys of an indexer."""

from collections.abc import Sequence
from typing import Any, Self

from kvdb.session.runner import Course, Starts, StepsTaken
from kvdb.types import Float32
from query_optimizer.query_options import QueryOptions


class NoSteps:
    """Refuses every step; see `kvdb.session.runner.StepRunner`."""

    running = halted = False

    def set_sinks(self, sinks: Float32 | None) -> None:
        assert sinks is None, "keys alone have no sinks"

    def begin(self, course: Course, asked: QueryOptions, steps: int, keeps: int) -> None:  # noqa: ARG002
        raise AssertionError("keys alone are not attended")

    def run(self, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:  # noqa: ARG002
        return None

    def run_with(self, others: Sequence[Self], q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts) -> Any | None:  # noqa: ARG002
        return None

    def collect(self) -> StepsTaken | None:
        return None

    def stop(self) -> None:
        pass

    def resume(self) -> bool:
        return False

    def last_kernel(self) -> tuple[int, int]:
        return 0, 0

    def planned(self, kernel_ns: int) -> None:
        pass
