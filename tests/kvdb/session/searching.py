"""A database for tests of what is searched, and how."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database


@contextmanager
def searching_database() -> Iterator[Database]:
    """A database that may search whatever has an index, and builds none by itself."""
    config = Config(
        storage=StorageConfig(arena_bytes=1 << 20),
        optimizer=OptimizerConfig(rules_off=("short_context",), machine_file=""),
        window=WindowConfig(sink_tokens=4, recent_tokens=64),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=256),
    )
    with Database(config) as database:
        yield database
        database.check_integrity()
