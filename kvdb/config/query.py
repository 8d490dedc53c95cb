"""The settings of how queries are answered: processors, optimizer, window and indexes."""

from dataclasses import dataclass

import indexes.registry as registry
from kvdb.config.checks import check_least, check_types
from kvdb.errors import ConfigError

THREADS_MAX = 1024
OWN_CACHE = "own"
"""The value of optimizer.machine_file that means the user's cache folder."""
ERROR_MAX = 0.02
"""How far the output of a layer may be from exact attention where nobody says otherwise."""


@dataclass(frozen=True)
class CpuConfig:
    """How much of the processors may be used.

    threads: how many threads one call may use, the caller's own included, in the whole process: of several databases in it, the
    one that was opened last says so. None for KVDB_THREADS or, without it, the processors of the process's affinity, no more
    than the CPU quota of its container is worth.
    """

    threads: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "cpu")
        if self.threads is not None and not 1 <= self.threads <= THREADS_MAX:
            raise ConfigError(f"cpu.threads is {self.threads}; expected 1 to {THREADS_MAX}")


@dataclass(frozen=True)
class OptimizerConfig:
    """What decides how a query is answered.

    short_context_tokens: contexts up to this length are always read whole. rules_off: names of rules that are not applied.
    machine_file: the file that keeps what `kvdb calibrate` measures; "own" is one in the user's cache folder, "" is no file, so
    that costs are estimated for a usual machine. calibrate_at_start: whether `kvdb serve` measures the machine where that file
    has no numbers of it. error_max: of queries that name nothing, in sessions that name none; see `kvdb.QueryOptions`.
    """

    short_context_tokens: int = 4096
    rules_off: tuple[str, ...] = ()
    machine_file: str = OWN_CACHE
    calibrate_at_start: bool = True
    error_max: float = ERROR_MAX

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        if not 0 <= self.error_max <= 1:
            raise ConfigError(f"optimizer.error_max is {self.error_max}; expected a relative error from 0, which is exact, to 1")


@dataclass(frozen=True)
class WindowConfig:
    """The tokens that every query attends exactly.

    sink_tokens: the number of first tokens. recent_tokens: the number of last tokens of what is stored; the session's own tokens
    are all read until there are many.
    """

    sink_tokens: int = 64
    recent_tokens: int = 256

    def __post_init__(self) -> None:
        check_types(self, "window")
        check_least(self, "window", sink_tokens=0, recent_tokens=0)


@dataclass(frozen=True)
class IndexConfig:
    """Which indexes are built, and when.

    at_store: kinds of index that are built over everything that is stored. on_demand: the kind that is built when a query asks
    for a retrieval that no index can answer yet, "" for none. segment_tokens_min: segments shorter than this get no index.
    tail_tokens: how many new tokens of a session are indexed at a time, 0 for none. threads: how many indexes are built at once.
    sample_queries: how many queries of each layer and head a session keeps, half of that at least, from which the indexes of what
    it stores learn, and by which ways are proven when it has ended.
    automatic: whether indexes are built when queries show that they will pay. opened_often: a segment that this many sessions
    have opened is expected to be queried as much again. bytes_max: bytes of memory for all indexes, None for no limit.
    """

    at_store: tuple[str, ...] = ()
    on_demand: str = "flat"
    segment_tokens_min: int = 2048
    tail_tokens: int = 1024
    threads: int = 1
    sample_queries: int = 128
    automatic: bool = True
    opened_often: int = 3
    bytes_max: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "indexes")
        for kind in (*self.at_store, *filter(None, [self.on_demand])):
            if kind not in registry.KINDS:
                raise ConfigError(f"indexes names the kind {kind!r}; expected one of {', '.join(registry.KINDS)}")
        check_least(
            self, "indexes", segment_tokens_min=1, threads=1, opened_often=1, tail_tokens=0, sample_queries=0, bytes_max=0
        )
