"""Lookups that fail are misses, and the process's one client."""

import numpy as np
import pytest

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm import shared_client
from engine_adapter.vllm.presence import Lookups, Presence
from kvdb.errors import KvdbError

TOKENS = np.arange(20, dtype=np.int32)


def test_a_database_that_is_closed_is_a_miss(db, spec, caplog):
    lookups = Lookups(ModelContexts(db, spec, "vllm"), Presence())
    assert lookups.find(TOKENS, "") == 0
    assert "kvdb steps aside" not in caplog.text
    db.close()
    for _ in range(3):
        assert lookups.find(TOKENS, "") == 0
    assert caplog.text.count("kvdb steps aside") == 1


def test_a_lookup_that_fails_by_itself_does_not_hold_the_others_up(db, spec, caplog):
    contexts = ModelContexts(db, spec, "vllm")
    lookups = Lookups(contexts, Presence())
    assert lookups.find(TOKENS, 7) == 0
    assert "is not looked up" in caplog.text
    with contexts.open(TOKENS) as session:
        zeros = np.zeros((spec.kv_heads, len(TOKENS), spec.head_dim), np.float32)
        for layer in range(spec.layers):
            session.update(layer, zeros, zeros)
        contexts.keep(session, TOKENS)
    assert lookups.find(TOKENS, "") == len(TOKENS)


def test_without_a_database_nothing_is_found():
    assert Lookups(None, Presence()).find(TOKENS, "") == 0


def test_both_roles_of_a_process_have_one_client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, presence = shared_client.acquire("./store")
    other, same = shared_client.acquire(str(tmp_path / "store"))
    assert one is other
    assert presence is same
    shared_client.release("store")
    assert one.contexts() == []
    shared_client.release("./store")
    with pytest.raises(KvdbError):
        one.contexts()
