"""The tiers of one database, seen while others are opened, and what counts as a lost block."""

import sys
import threading

import numpy as np
import pytest

from kvdb.config import StorageConfig
from kvdb.errors import IntegrityError
from kvdb.storage.store import BlockStore, Owners
from kvdb.types import ModelSpec

SECONDS_MAX = 20


@pytest.fixture
def store():
    store = BlockStore(StorageConfig(arena_bytes=1 << 20))
    yield store
    store.close()


@pytest.fixture
def often():
    """Threads take turns after every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def model(head_dim, kv_heads=1):
    return ModelSpec("m", 1, kv_heads, kv_heads, head_dim, "float32")


def tokens(spec, n):
    return np.ones((spec.kv_heads, n, spec.head_dim), spec.numpy_dtype)


def test_tiers_are_told_while_those_of_new_models_are_opened(store, often):
    wrong, end = [], threading.Event()

    def tell():
        try:
            while not end.is_set():
                store.stats()
                store.check_integrity(lambda: Owners([], []))
        except (RuntimeError, IntegrityError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=tell) for _ in range(2)]
    for thread in threads:
        thread.start()
    for head_dim in range(8, 256, 8):
        for kv_heads in range(1, 12):
            store.tables(model(head_dim, kv_heads))
    end.set()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert not wrong


def test_the_books_are_right_while_owners_come_and_go(store, often):
    """An owner may have left its place, and not yet given back what it held there."""
    spec, owned, wrong, end = model(16), [], [], threading.Event()

    def check():
        try:
            while not end.is_set():
                store.check_integrity(lambda: Owners(list(owned), []))
        except IntegrityError as error:
            wrong.append(error)

    checking = threading.Thread(target=check)
    checking.start()
    for _ in range(300):
        (table,) = store.tables(spec)
        table.append(tokens(spec, 100), tokens(spec, 100))
        owned.append(table)
        owned.remove(table)
        table.release()
    end.set()
    checking.join(SECONDS_MAX)
    assert not wrong


def test_a_block_that_nobody_owns_is_told(store):
    spec = model(16)
    (table,) = store.tables(spec)
    table.append(tokens(spec, 100), tokens(spec, 100))
    store.check_integrity(lambda: Owners([table], []))
    with pytest.raises(IntegrityError, match="as many references as owners"):
        store.check_integrity(lambda: Owners([], []))
