"""Lookups that fail are misses, and the process's one client."""

import numpy as np
import pytest

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm import shared_client
from engine_adapter.vllm.lookups import PAUSE_SECONDS, Lookups
from kvdb.errors import KvdbError

TOKENS = np.arange(20, dtype=np.int32)


def test_a_database_that_fails_is_left_alone_for_a_while(db, spec, caplog):
    now = 100.0
    lookups = Lookups(ModelContexts(db, spec, "vllm"), clock=lambda: now)
    assert lookups.find(TOKENS, "") == 0
    assert "kvdb steps aside" not in caplog.text
    db.close()
    for _ in range(3):
        assert lookups.find(TOKENS, "") == 0
    assert caplog.text.count("kvdb steps aside") == 1
    now += PAUSE_SECONDS
    assert lookups.find(TOKENS, "") == 0
    assert caplog.text.count("kvdb steps aside") == 2


def test_without_a_database_nothing_is_found():
    assert Lookups(None).find(TOKENS, "") == 0


def test_both_roles_of_a_process_have_one_client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = shared_client.acquire("./store")
    other = shared_client.acquire(str(tmp_path / "store"))
    assert one is other
    shared_client.release("store")
    assert one.contexts() == []
    shared_client.release("./store")
    with pytest.raises(KvdbError):
        one.contexts()
