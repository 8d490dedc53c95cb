"""Databases for tests: they prove their integrity when the test is over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database

BLOCK, SINK, RECENT = 16, 8, 16
"""The sizes of a small database."""


@contextmanager
def database(rules: Sequence = (), config: Config | None = None) -> Iterator[Database]:
    """A database with little memory, unless `config` says otherwise. rules: are asked beside the optimizer's own."""
    with Database(config or Config(storage=StorageConfig(arena_bytes=1 << 20)), rules=rules) as opened:
        yield opened
        opened.check_integrity()


def small_config(rules_off: tuple[str, ...] = ("short_context",), **indexes) -> Config:
    """Everything is small, so that a few hundred tokens are searched."""
    return Config(
        storage=StorageConfig(block_size=BLOCK, arena_bytes=1 << 20),
        optimizer=OptimizerConfig(short_context_tokens=64, rules_off=rules_off),
        window=WindowConfig(SINK, RECENT),
        indexes=IndexConfig(on_demand="", segment_tokens_min=64, **indexes),
    )


def searching_config(disk_path: str = "", **optimizer) -> Config:
    """A database that may search whatever has an index, and builds none by itself."""
    return Config(
        storage=StorageConfig(arena_bytes=1 << 20, disk_path=disk_path),
        optimizer=OptimizerConfig(rules_off=("short_context",), machine_file="", **optimizer),
        window=WindowConfig(sink_tokens=4, recent_tokens=64),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=256),
    )
