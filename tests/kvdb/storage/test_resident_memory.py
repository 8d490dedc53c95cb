"""What a database takes of main memory stays within its budget, whatever it stores and however it got there."""

import os

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError

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
        databases.append(Database(Config(storage=StorageConfig(cpu_bytes_max=nbytes, **storage), indexes=IndexConfig())))
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
