"""Whoever carries out the decode steps of a layer that need no new plan, and the states that a layer can be in between two steps.

There is one for main memory, `kvdb.session.host_steps`, and one for a GPU, `kvdb.session.device_steps`; which of the two is known
when a session opens. Whatever a runner refuses, `kvdb.session.step` plans anew.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self

from kvdb.attention.exact import AttentionStats
from kvdb.errors import KvdbError
from kvdb.planning.prepared import Prepared
from kvdb.types import Array, Float32
from query_optimizer.query_options import QueryOptions

Starts = Sequence[int] | None
"""The position of each session's first token, as the caller believes; None where it says nothing."""


class LayerState(Enum):
    """What the next step of a layer begins with. loading: waiting for what it reads. planned: a plan. running: nothing,
    for its runner takes it. halted: its runner took all steps that it was allowed, and is asked to `resume`. closed: an error.
    """

    loading = "loading"
    planned = "planned"
    running = "running"
    halted = "halted"
    closed = "closed"


class Course(NamedTuple):
    """How steps are carried out: the plan, the options that it was made for, and whether it searches."""

    prepared: Prepared
    options: QueryOptions
    searches: bool


class StepsTaken(NamedTuple):
    """Steps of a course. stats: sums over them, but for the largest bound. tokens: before each, their sum. failed: what was wrong
    with those that followed, which were answered and are forgotten. recent: queries and answers that were kept, `[q_heads, m,
    head_dim]`, those of the last tokens."""

    course: Course
    number: int
    stats: AttentionStats
    tokens: int
    failed: KvdbError | None = None
    recent: tuple[Array, Array] | None = None


class StepRunner(Protocol):
    """Carries out steps of one layer like the one before: one token is appended, and its query answered by the same plan.

    The caller holds the session's turn. Steps end where anything rarer is due: a plan that is used up, new indexes or evidence, a
    comparison. Then they are refused.
    """

    def set_sinks(self, sinks: Float32 | None) -> None:
        """The logits of the layer's sinks, float32 `[q_heads]`, None for none. It may take no steps meanwhile."""
        ...

    @property
    def running(self) -> bool:
        """Whether it may take steps, between `begin` and `stop`."""
        ...

    @property
    def halted(self) -> bool:
        """Whether it took all steps that it was allowed, and nothing else stopped it."""
        ...

    def begin(self, course: Course, asked: QueryOptions, steps: int, keeps: int) -> None:
        """Go on by the plan that answered the last query. asked: the options as the caller handed them in. steps: how many may be
        taken at most. keeps: how many of the last queries and answers `collect` is to hand over."""
        ...

    def run(self, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """Take one step: q and the answer `[q_heads, 1, head_dim]`, k and v `[kv_heads, 1, head_dim]`. None where it is refused,
        which includes every wrong argument; then nothing was done."""
        ...

    def run_with(self, others: Sequence[Self], q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts) -> Any | None:
        """Take one step with runners of other sessions of one model, all or none: arrays `[sessions, heads, 1, head_dim]`, the
        first of this one. What several read is read once. None as in `run`. Raises InvalidArgument for starts that cannot be."""
        ...

    def collect(self) -> StepsTaken | None:
        """The steps since the last time, None for none. From then on the tail, the sample of queries and the statistics know them
        too. Raises CapacityError where a GPU cannot hand them over, and keeps them."""
        ...

    def stop(self) -> None:
        """Refuse further steps, until `begin`. What was taken has to be collected before."""
        ...

    def resume(self) -> bool:
        """Go on after a halt, into more room. False where what was taken has to be collected first, and `begin` follows."""
        ...

    def last_kernel(self) -> tuple[int, int]:
        """How many nanoseconds the kernels of the layer's last attend took, and how many threads one of its own uses."""
        ...

    def planned(self, kernel_ns: int) -> None:
        """The last attend was planned, and its kernels took so long."""
        ...
