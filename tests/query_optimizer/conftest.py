"""A small database, embedded and remote, that holds 1,500 tokens."""

import pytest

from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database

N, MORE = 1500, 40


@pytest.fixture
def engine():
    config = Config(
        storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
        optimizer=OptimizerConfig(short_context_tokens=64, rules_off=("short_context",)),
        window=WindowConfig(8, 16),
        indexes=IndexConfig(on_demand="", segment_tokens_min=64, tail_tokens=32),
    )
    with Database(config) as database:
        yield database
        database.check_integrity()


class Document:
    """A context of N tokens by the name "doc", with sharp queries, and MORE tokens to come."""

    def __init__(self, db, kv):
        self.db, self.kv, self.spec = db, kv, kv.spec
        self.q = kv.q * 8
        queries = [q[:, :20] for q in self.q]
        db.import_context(kv.spec, kv.tokens[:N], kv.pairs(0, N), name="doc", queries=queries)
        db.import_context(kv.spec, kv.tokens[:30] + 1, kv.pairs(0, 30), name="short")

    def open(self, name="doc"):
        return self.db.create_session(self.spec, self.kv.tokens[:N] if name == "doc" else self.kv.tokens[:30] + 1)

    def attend(self, session, layer, at, **options):
        now = slice(at, at + 1)
        k, v = self.kv.pairs(at, at + 1)[layer]
        return session.attend(layer, self.q[layer][:, now], k, v, **options)


@pytest.fixture
def document(db, spec, make_kv):
    return Document(db, make_kv(spec, N + MORE))
