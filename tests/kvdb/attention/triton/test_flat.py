"""Codes: what they say of a key is never wrong by more than they admit."""

import pytest
import torch

from kvdb.attention.triton import flat
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout
from tests.kvdb.attention.triton.reference import fill, make_pages, put, read
from tests.kvdb.attention.triton.sequences import queries


def decoded(pages, slot, count):
    """Keys as codes have them, and what they leave, `[kv_heads, count, head_dim]` and `[kv_heads, count]`, float64."""
    layout, row = pages.layout, pages.slab[slot]
    heads, block, dim = layout.kv_heads, layout.block_size, layout.head_dim
    codes = row[layout.codes_at :][: heads * block * dim // 2].view(heads, block, dim // 2)
    steps = torch.cat([codes & 15, codes >> 4], 2).double() - 7.5
    step, left = row[layout.factors_at :][: 4 * heads * block].view(torch.bfloat16).view(2, heads, block).double()
    centres = row[layout.centres_at :][: 2 * heads * dim].view(torch.bfloat16).view(heads, 1, dim).double()
    return (centres + step[..., None] * steps)[:, :count], left[:, :count]


@pytest.mark.parametrize("format_", SLOT_FORMATS)
@pytest.mark.parametrize(("block_size", "head_dim", "count"), [(64, 64, 64), (48, 40, 31), (1, 8, 1), (100, 128, 99)])
def test_no_key_is_farther_from_its_code_than_is_said(format_, block_size, head_dim, count):
    pages = make_pages(SlotLayout(format_, 2, head_dim, block_size), 3)
    fill(pages, [1], count, seed=count)
    flat.encode(pages, torch.tensor([1], dtype=torch.int32), torch.tensor([count], dtype=torch.int32))
    keys = read(pages, [1], count)[0]
    near, left = decoded(pages, 1, count)
    away = (keys - near).norm(dim=2)
    assert (away <= left).all()
    assert (left <= 1.02 * away + 0.01 * keys.norm(dim=2)).all()
    if block_size > 1:
        assert away.mean() < 0.12 * keys.norm(dim=2).mean(), "four bits should leave a tenth"


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_what_all_keys_share_costs_nothing(offset):
    pages = make_pages(SlotLayout("bfloat16", 1, 64, 64), 1)
    k = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(5))
    k[..., 7] += offset
    fill(pages, [0], 64, k=k)
    flat.encode(pages, torch.zeros(1, dtype=torch.int32), torch.full((1,), 64, dtype=torch.int32))
    near, left = decoded(pages, 0, 64)
    assert ((read(pages, [0], 64)[0] - near).norm(dim=2) <= left).all()
    assert left.mean() < (0.2 if offset else 0.13) * 8


def test_equal_keys_and_zeros_are_known_exactly():
    pages = make_pages(SlotLayout("float32", 2, 16, 8), 1)
    fill(pages, [0], 8, k=torch.zeros(2, 8, 16))
    flat.encode(pages, torch.zeros(1, dtype=torch.int32), torch.full((1,), 8, dtype=torch.int32))
    near, left = decoded(pages, 0, 8)
    assert (near == 0).all()
    assert (left == 0).all()


def test_only_index_pages_are_written_and_only_of_these_slots():
    layout = SlotLayout("bfloat16", 2, 32, 8)
    pages = make_pages(layout, 3)
    fill(pages, [0, 1, 2], 24)
    before = pages.slab.clone()
    flat.encode(pages, torch.tensor([2, 0], dtype=torch.int32), torch.tensor([8, 3], dtype=torch.int32))
    changed = pages.slab != before
    assert not changed[1].any()
    assert not changed[:, : layout.codes_at].any()
    assert not changed[:, layout.bounds_at :].any()
    codes = changed[0, layout.codes_at : layout.factors_at][: 2 * 8 * 16].view(2, 8, 16)
    assert not codes[:, 3:].any()
    assert codes[:, :3].any()


def test_a_tail_that_grows_is_coded_anew():
    layout = SlotLayout("float32", 1, 32, 16)
    grown, whole = make_pages(layout, 1), make_pages(layout, 1)
    k = queries(1, 16, 32)
    zero = torch.zeros(1, dtype=torch.int32)
    for count in (1, 5, 16):
        put(grown, [0], k[:, :count], k[:, :count])
        flat.encode(grown, zero, zero + count)
    put(whole, [0], k, k)
    flat.encode(whole, zero, zero + 16)
    assert torch.equal(grown.slab, whole.slab)


def test_what_does_not_fit_is_refused():
    pages = make_pages(SlotLayout("float32", 1, 12, 4), 1)
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="multiple of 8"):
        flat.encode(pages, zero, zero)
    with pytest.raises(ValueError, match="counts is"):
        flat.encode(pages, zero, torch.zeros(2, dtype=torch.int32))
