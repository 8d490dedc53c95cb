"""A database that keeps what it offloads in a folder, and what tests ask of it."""

import threading
from contextlib import contextmanager

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database

SPEC = kvdb.ModelSpec("model", layers=4, q_heads=4, kv_heads=2, head_dim=32, dtype="bfloat16", rope=kvdb.Rope())
ARENA = 1 << 20


@contextmanager
def opened(folder, *, cpu_bytes_max=None, **indexes):
    """An engine and a client of it; at the end nothing is left of what it took."""
    storage = StorageConfig(arena_bytes=ARENA, disk_path=str(folder), cpu_bytes_max=cpu_bytes_max)
    engine = Database(Config(storage=storage, indexes=IndexConfig(**indexes)))
    try:
        yield engine, Client(engine)
        engine.check_integrity()
    finally:
        engine.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-load")]


def answers(session, kv, layers=range(SPEC.layers)):
    return [session.attention(layer, kv.q[layer, :, :3]) for layer in layers]


def asked(db, kv):
    """Every layer's answer, from a session that is opened and closed for it."""
    session = db.create_session(SPEC, kv.tokens)
    out = answers(session, kv)
    session.close()
    return out


def same(left, right):
    return all((a == b).all() for a, b in zip(left, right, strict=True))


def held(engine, tier):
    return sum(stats.blocks_used for stats in engine.tiers() if stats.name == tier)


def the_file(folder):
    (path,) = folder.glob("*/*.segment")
    return path


def change(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
