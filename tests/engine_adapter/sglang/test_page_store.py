"""Chains of pages in kvdb, and the memory they come from and go to."""

import numpy as np
import pytest
import torch

from engine_adapter.sglang.host_pages import HostPages
from engine_adapter.sglang.keys import page_keys
from engine_adapter.sglang.page_store import PageStore
from engine_adapter.sglang.sharing import adopt, offer
from kvdb.errors import Unsupported
from tests.engine_adapter.sglang.conftest import PAGE, PAGES, Pool

SPREAD = (3, 4, 9, 1, 0)
"""Pages of a pool, two of which lie one behind the other."""


def indices(pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.fixture
def keys(make_kv, spec):
    return page_keys(make_kv(spec, PAGE * PAGES).tokens, PAGE)


@pytest.fixture
def make_store(contexts):
    return lambda pool: PageStore(contexts, "sglang", HostPages.of(pool))


def pages_of(pool, pages):
    return [pool.get_data_page(page * PAGE) for page in pages]


def test_pages_come_back_to_other_places(make_pool, make_store, keys):
    written, read = make_pool(1), make_pool(None)
    assert make_store(written).write(keys[:5], 0, indices(SPREAD))
    store = make_store(read)
    assert store.count(keys) == 5
    assert store.read(keys, 0, indices([11, 10, 7, 6, 5, *range(7)])) == 5
    for got, expected in zip(pages_of(read, (11, 10, 7, 6, 5)), pages_of(written, SPREAD), strict=True):
        assert torch.equal(got, expected)
    assert not any(page.any() for page in pages_of(read, range(5)))


def test_a_chain_goes_on_where_it_ended(make_pool, make_store, keys, db):
    pool, back = make_pool(1), make_pool(None)
    store = make_store(pool)
    assert store.write(keys[:2], 0, indices([0, 1]))
    assert store.write(keys[:4], 2, indices([2, 3]))
    assert store.write(keys[:4], 1, indices([1, 2, 3])), "all of it is there"
    assert store.write(keys[:5], 1, indices([1, 2, 3, 4])), "most of it is there"
    assert make_store(back).read(keys[:5], 2, indices([2, 3, 4])) == 3
    for got, expected in zip(pages_of(back, (2, 3, 4)), pages_of(pool, (2, 3, 4)), strict=True):
        assert torch.equal(got, expected)


def test_nothing_is_stored_behind_a_gap(make_pool, make_store, keys, db):
    store = make_store(make_pool(1))
    assert not store.write(keys[:4], 2, indices([2, 3]))
    assert db.contexts() == []
    assert store.count(keys) == 0


def test_another_prefix_is_another_chain(make_pool, make_store, keys):
    store = make_store(make_pool(1))
    store.write(keys[:3], 0, indices([0, 1, 2]))
    other = page_keys(np.arange(PAGE * 3), PAGE)
    assert store.count(other) == 0
    assert store.count([keys[0], other[1]]) == 1


def test_the_layout_by_name_is_the_logical_form(make_pool, spec):
    """What `views` shows is one array, however the pool lays it out."""
    pool = make_pool(1)
    pages = HostPages.of(pool)
    assert (pages.layers, pages.kv_heads, pages.head_dim) == (spec.layers, spec.kv_heads, spec.head_dim)
    order = {
        "layer_first": (0, 1, 3, 2, 4),
        "page_first": (0, 2, 3, 1, 4),
        "page_first_direct": (0, 2, 4, 1, 3, 5),
        "page_head": (0, 4, 2, 1, 3, 5),
    }[pool.layout]
    logical = pool.kv_buffer.permute(order).reshape(2, spec.layers, spec.kv_heads, PAGE * PAGES, spec.head_dim)
    for first, tokens in pages.runs(indices(SPREAD)):
        for layer, (k, v) in enumerate(pages.views(first, tokens)):
            assert torch.equal(k, logical[0, layer, :, first : first + tokens])
            assert torch.equal(v, logical[1, layer, :, first : first + tokens])


def test_an_unknown_layout_is_refused():
    with pytest.raises(Unsupported, match="page_unified"):
        HostPages.of(Pool(torch.zeros(2, 1, 16, 1, 16), "page_unified"))


def test_other_engines_find_what_sglang_keeps(make_pool, make_store, keys, contexts, make_kv, spec):
    pool, tokens = make_pool(1), make_kv(spec, PAGE * PAGES).tokens
    make_store(pool).write(keys[:5], 0, indices(range(5)))
    assert contexts.find(tokens) == 0
    assert adopt(contexts, tokens, PAGE) == 5 * PAGE
    assert adopt(contexts, tokens, PAGE) == 5 * PAGE
    with contexts.open(tokens) as session:
        assert session.reused == 5 * PAGE
        for layer, (k, v) in enumerate(HostPages.of(pool).one(pool.get_data_page(0)).views(0, PAGE)):
            got_k, got_v = session.read(layer, 0, PAGE)
            assert np.array_equal(got_k, k.numpy())
            assert np.array_equal(got_v, v.numpy())


def test_sglang_finds_what_other_engines_keep(make_pool, make_store, keys, contexts, make_kv, spec, db):
    pool, kv = make_pool(None), make_kv(spec, PAGE * 4 + 5)
    db.import_context(spec, kv.tokens, kv.pairs(), name="c")
    assert make_store(pool).count(keys) == 0
    assert offer(contexts, kv.tokens, PAGE) == PAGE * 4
    assert make_store(pool).read(keys, 0, indices(range(PAGES))) == 4
    for first, tokens in HostPages.of(pool).runs(indices([2])):
        for (k, v), (expected_k, expected_v) in zip(
            HostPages.of(pool).views(first, tokens), kv.pairs(PAGE * 2, PAGE * 3), strict=True
        ):
            assert np.array_equal(k.numpy(), expected_k)
            assert np.array_equal(v.numpy(), expected_v)
