"""What a database takes of main memory stays within its budget, whatever it stores and however it got there."""

import gc
import os
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError
from kvdb.storage import budget as budgets

MIB = 1 << 20


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def model(head_dim, layers=2, kv_heads=2, dtype="bfloat16"):
    return kvdb.ModelSpec(f"model {head_dim}", layers, kv_heads, kv_heads, head_dim, dtype)


@pytest.fixture
def budgeted():
    """`budgeted(nbytes)`: a database with that budget, and otherwise as it comes."""
    databases = []

    def open_(nbytes, **storage):
        databases.append(
            Database(Config(storage=StorageConfig(cpu_bytes_max=nbytes, eviction="none", **storage), indexes=IndexConfig()))
        )
        return databases[-1]

    yield open_
    for database in databases:
        database.close()


def store(engine, spec, tokens, name, first=0):
    ids = np.arange(first, first + tokens, dtype=np.int32)
    writing = engine.begin_import(spec, ids, name)
    kv = np.ones((spec.kv_heads, tokens, spec.head_dim), spec.numpy_dtype)
    try:
        for layer in range(spec.layers):
            writing.write(layer, kv, kv)
    except CapacityError:
        writing.abort()
        raise
    writing.commit()


def grown(session, kv):
    """Whether a session found room for these tokens in every layer."""
    try:
        for layer in range(session.spec.layers):
            session.update(layer, kv, kv)
    except CapacityError:
        return False
    return True


def stored(engine, spec, name, first):
    """Whether there was room for a context of one token."""
    try:
        store(engine, spec, 1, name, first)
    except CapacityError:
        return False
    return True


@pytest.mark.parametrize("budget", [3 * MIB + 5000, 63 * MIB, 150_000_000])
@pytest.mark.parametrize("head_dim", [8, 64, 200])
def test_it_stays_within_five_percent_and_64_mib_of_the_budget(budgeted, budget, head_dim):
    """A session that grows by a block at a time, to the end and once more after it was closed."""
    spec, engine = model(head_dim), budgeted(budget)
    before, most = resident_nbytes(), 0
    kv = np.ones((spec.kv_heads, 512, head_dim), spec.numpy_dtype)
    for _ in range(2):
        session = engine.create_session(spec, np.zeros(0, np.int32))
        while grown(session, kv):
            most = max(most, resident_nbytes() - before)
        (cpu,) = engine.tiers()
        assert cpu.nbytes <= budget
        assert cpu.blocks_used * cpu.block_nbytes > 0.9 * budget - 8 * cpu.block_nbytes * spec.layers
        session.close()
    assert most <= 1.05 * budget + 64 * MIB


def test_many_small_contexts_stay_within_it(budgeted):
    """A context of one token takes a block of each layer, and tables, names and numbers beside them."""
    spec, engine, budget = model(64, layers=8), budgeted(96 * MIB), 96 * MIB
    before, count = resident_nbytes(), 0
    while stored(engine, spec, f"context {count}", first=count):
        count += 1
    assert resident_nbytes() - before <= 1.05 * budget + 64 * MIB
    assert count > 300


def test_a_dropped_model_makes_room_for_another(budgeted):
    engine = budgeted(64 * MIB)
    first, second = model(128, kv_heads=8, dtype="float32"), model(64, kv_heads=8, dtype="float32")
    for _ in range(2):
        for spec, tokens in ((first, 3500), (second, 7000)):
            store(engine, spec, tokens, "document")
            with pytest.raises(CapacityError):
                store(engine, spec, 5000, "more", first=100_000)
            engine.drop("document")
            engine.check_integrity()


def test_one_token_of_many_models_leaves_room_for_all(budgeted):
    engine = budgeted(64 * MIB)
    for head_dim in range(8, 136, 8):
        store(engine, model(head_dim, kv_heads=8, dtype="float32"), 1, f"model {head_dim}")


TINY = 8
"""A head dimension for which a block of one KV head takes 2 KiB, less than the objects beside it."""


@pytest.fixture
def counts_all(monkeypatch):
    """What stands beside blocks counts from the first byte on, and not from what a process may take anyway."""
    monkeypatch.setattr(budgets, "FREE_BYTES", 0)
    monkeypatch.setattr(budgets, "FREE_SHARE", 1 << 60)


@contextmanager
def traced():
    """`nbytes()` inside: what Python and numpy have allocated since, and still hold; blocks are not among it."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()

    def nbytes():
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    try:
        yield nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layers", [1, 16])
def test_contexts_of_tiny_blocks_stay_within_the_budget(budgeted, counts_all, layers):
    spec, budget = model(TINY, layers, kv_heads=1), MIB
    engine, count = budgeted(budget), 0
    stored(engine, spec, "warm", first=1 << 20)
    engine.drop("warm")
    with traced() as nbytes:
        while stored(engine, spec, f"context {count}", first=count):
            count += 1
        (cpu,) = engine.tiers()
        assert cpu.nbytes + nbytes() <= 1.05 * budget
        assert cpu.blocks_used * cpu.block_nbytes + nbytes() > 0.6 * budget
    for number in range(count):
        engine.drop(f"context {number}")
    store(engine, spec, 64 * (budget // cpu.block_nbytes // layers // 2), "one that takes half", first=1 << 20)


@pytest.mark.parametrize(("tokens", "queries"), [(0, 0), (1, 1), (80, 80)])
def test_sessions_of_tiny_blocks_stay_within_the_budget(budgeted, counts_all, tokens, queries):
    """Also the plans that they make and the queries that they keep."""
    spec, budget = model(TINY, 4, kv_heads=1), MIB
    engine, sessions = budgeted(budget), []
    kv = np.ones((1, tokens, TINY), spec.numpy_dtype)

    def opened():
        try:
            sessions.append(engine.create_session(spec, np.zeros(0, np.int32)))
            for layer in range(spec.layers):
                if tokens:
                    sessions[-1].update(layer, kv, kv)
                if queries:
                    sessions[-1].attention(layer, kv[:, :queries])
        except CapacityError:
            return False
        return True

    opened()
    sessions.pop().close()
    with traced() as nbytes:
        while opened():
            pass
        assert sum(tier.nbytes for tier in engine.tiers()) + nbytes() <= 1.05 * budget
    assert len(sessions) > 10
    for session in sessions:
        session.close()
    again = engine.create_session(spec, np.zeros(0, np.int32))
    assert grown(again, np.ones((1, 64 * (budget // (4 * 2048) - 20), TINY), spec.numpy_dtype))
    again.close()
