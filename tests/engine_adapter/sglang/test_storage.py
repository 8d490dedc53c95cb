"""The backend as SGLang loads and calls it, on SGLang's own base classes."""

import json

import numpy as np
import pytest
import torch

from engine_adapter.sglang.keys import page_keys
from kvdb.config import ServerConfig
from kvdb.errors import InvalidArgument, SpecMismatch, Unsupported
from kvdb.server.serve import Server
from tests.engine_adapter.sglang.conftest import PAGE
from tests.engine_adapter.sglang.test_page_store import indices, pages_of

pytestmark = pytest.mark.usefixtures("sglang")

KEYS = page_keys(np.arange(PAGE * 12), PAGE)
LOADED = {"backend_name": "kvdb", "module_path": "engine_adapter.sglang.storage", "class_name": "KvdbStorage", "interface_v1": 1}


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "store")


def configuration(target, spec, **changes):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    extra = {**LOADED, "target": target, "spec": spec.to_dict()}
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**given | changes)


@pytest.fixture
def make_backend(folder, spec):
    """`make_backend(pool, **changes)` makes a backend as SGLang does: by the module's path, out of its factory."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    backends = []

    def make(pool, target=folder, **changes):
        backend = StorageBackendFactory.create_backend("dynamic", configuration(target, spec, **changes), pool)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


def behind(keys):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=list(keys))


def test_prefixes_are_found_in_a_new_process(make_backend, make_pool):
    written, read = make_pool(1), make_pool(None)
    one = make_backend(written)
    assert one.batch_set_v1(KEYS[:2], indices([0, 1]), behind([])) == [True, True]
    assert one.batch_set_v1(KEYS[2:5], indices([4, 3, 2]), behind(KEYS[:2])) == [True] * 3
    one.close()
    other = make_backend(read)
    assert other.batch_exists(KEYS, behind([])) == 5
    assert other.batch_exists(KEYS[3:], behind(KEYS[:3])) == 2
    assert other.batch_get_v1(KEYS[1:6], indices([7, 8, 9, 10, 11]), behind(KEYS[:1])) == [True] * 4 + [False]
    for got, expected in zip(pages_of(read, (7, 8, 9, 10)), pages_of(written, (1, 4, 3, 2)), strict=True):
        assert torch.equal(got, expected)


def test_pages_are_kept_one_by_one_without_the_keys_before(make_backend, make_pool):
    pool, back = make_pool(1), make_pool(None)
    backend = make_backend(pool)
    assert backend.batch_set_v1(KEYS[3:5], indices([3, 4])) == [True, True]
    assert backend.batch_exists(KEYS[3:6]) == 2
    assert backend.exists(KEYS[4])
    assert not backend.exists(KEYS[0])
    backend.close()
    other = make_backend(back)
    assert other.batch_get_v1(KEYS[4:6], indices([0, 1])) == [True, False]
    assert torch.equal(back.get_data_page(0), pool.get_data_page(4 * PAGE))


def test_single_pages_are_flat_tensors(make_backend, make_pool):
    pool = make_pool(1)
    backend = make_backend(pool)
    page = pool.get_data_page(0)
    assert backend.get(KEYS[0]) is None
    assert backend.set(KEYS[0], page)
    assert torch.equal(backend.get(KEYS[0]), page)
    target = torch.zeros_like(page)
    assert backend.get(KEYS[0], target) is target
    assert torch.equal(target, page)
    assert backend.batch_set(KEYS[1:3], pages_of(pool, (1, 2)))
    got = backend.batch_get(KEYS[:4], [torch.zeros_like(page) for _ in range(4)])
    assert [entry is not None for entry in got] == [True, True, True, False]
    assert torch.equal(got[2], pool.get_data_page(2 * PAGE))
    backend.clear()
    assert not backend.exists(KEYS[0])


def test_ranks_keep_their_own_heads(make_backend, make_pool, engine):
    pool = make_pool(1)
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    try:
        first, second = (make_backend(pool, server.target, tp_rank=rank, tp_size=2) for rank in range(2))
        assert first.batch_set_v1(KEYS[:1], indices([0]), behind([])) == [True]
        assert first.batch_exists(KEYS[:1], behind([])) == 1
        assert second.batch_exists(KEYS[:1], behind([])) == 0
        first.close()
        second.close()
    finally:
        server.stop(grace=0)


def test_a_database_that_is_not_there_is_a_miss(make_backend, make_pool, caplog):
    backend = make_backend(make_pool(1), "kvdb://127.0.0.1:1")
    assert backend.batch_exists(KEYS, behind([])) == 0
    assert backend.batch_set_v1(KEYS[:2], indices([0, 1]), behind([])) == [False, False]
    assert backend.batch_get_v1(KEYS[:2], indices([0, 1]), behind([])) == [False, False]
    assert backend.get(KEYS[0]) is None
    assert not backend.set(KEYS[0], torch.zeros(1))
    assert "kvdb steps aside" in caplog.text


def test_a_database_that_goes_is_a_miss(make_backend, make_pool):
    backend = make_backend(make_pool(1))
    assert all(backend.batch_set_v1(KEYS[:2], indices([0, 1]), behind([])))
    backend.close()
    assert backend.batch_exists(KEYS, behind([])) == 0
    assert backend.batch_get_v1(KEYS[:2], indices([0, 1]), behind([])) == [False, False]


def test_what_cannot_be_meant_is_refused(make_backend, make_pool, spec, tmp_path):
    pool = make_pool(1)
    with pytest.raises(Unsupported, match="latents"):
        make_backend(pool, is_mla_model=True)
    with pytest.raises(InvalidArgument, match="target and spec"):
        make_backend(pool, extra_config=LOADED)
    from engine_adapter.sglang.storage import KvdbStorage

    file = tmp_path / "spec.json"
    file.write_text(json.dumps({**spec.to_dict(), "head_dim": 32}))
    extra = {"target": str(tmp_path / "other"), "spec": str(file)}
    backend = KvdbStorage(configuration("x", spec, extra_config=extra), {})
    with pytest.raises(SpecMismatch, match="head_dim"):
        backend.register_mem_pool_host(pool)
    backend.close()
    with pytest.raises(InvalidArgument, match="spec is"):
        KvdbStorage(configuration("x", spec, extra_config={"target": "x", "spec": "missing.json"}))
