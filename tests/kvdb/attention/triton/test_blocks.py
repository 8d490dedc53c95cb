"""Storing, loading and copying blocks, against torch's own conversions."""

import pytest
import torch

from kvdb.attention.triton import blocks
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout

KV_HEADS, HEAD_DIM = 2, 24


def pages_of(format_, block_size=5, slots=6, head_dim=HEAD_DIM):
    """Poisoned: all bytes are those of a NaN."""
    layout = SlotLayout(format_, KV_HEADS, head_dim, block_size)
    return Pages(torch.full((slots, layout.nbytes), 0xFF, dtype=torch.uint8), layout)


def slots_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def rows(n, seed=0, head_dim=HEAD_DIM, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(KV_HEADS, n, head_dim, generator=generator).to(dtype) for _ in "kv"]


@pytest.mark.parametrize("format_", SLOT_FORMATS)
@pytest.mark.parametrize(("block_size", "start", "n"), [(5, 0, 15), (5, 3, 9), (5, 14, 1), (1, 1, 2), (64, 63, 66)])
def test_what_is_stored_is_loaded_in_the_formats_precision(format_, block_size, start, n):
    pages = pages_of(format_, block_size)
    slots = slots_of(4, 1, 3)
    stored = rows(n)
    blocks.store(pages, slots, start, *stored)
    for x, y in zip(stored, blocks.load(pages, slots, start, n), strict=True):
        if format_ in blocks.LARGEST:
            largest = x.abs().amax(2, keepdim=True)
            step = largest / 254 if format_ == "int8" else torch.maximum(x.abs() / 16, largest / 448 / 1024)
            assert ((x - y).abs() <= step * 1.001).all()
            assert torch.allclose(y.abs().amax(2, keepdim=True), largest, rtol=1e-6)
        else:
            assert torch.equal(y, x.to(TORCH[format_]).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_and_strides_are_taken(dtype):
    pages, slots = pages_of("bfloat16"), slots_of(2, 0)
    stored = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows(7, dtype=dtype)]
    blocks.store(pages, slots, 1, *stored)
    for x, y in zip(stored, blocks.load(pages, slots, 1, 7), strict=True):
        assert torch.equal(y, x.to(torch.bfloat16).float())


def test_a_start_on_the_device_is_the_same():
    stored = rows(6)
    by_host, by_device = pages_of("int8"), pages_of("int8")
    blocks.store(by_host, slots_of(5, 2), 3, *stored)
    blocks.store(by_device, slots_of(5, 2), slots_of(3), *stored)
    assert torch.equal(by_host.slab, by_device.slab)


@pytest.mark.parametrize("format_", ["bfloat16", "int8"])
def test_nothing_else_is_written(format_):
    pages = pages_of(format_)
    blocks.store(pages, slots_of(4, 1), 2, *rows(5))
    written = pages.slab != 0xFF
    assert written[[4, 1]].any(1).all()
    assert not written[[0, 2, 3, 5]].any()
    for slot, own in ((4, slice(2, 5)), (1, slice(0, 2))):
        others = torch.ones(5, dtype=torch.bool)
        others[own] = False
        part = pages.elements[slot, : KV_HEADS * 5 * HEAD_DIM].view(torch.uint8).view(KV_HEADS, 5, -1)
        assert (part[:, others] == 0xFF).all()
    assert not written[:, pages.layout.codes_at :].any()


@pytest.mark.parametrize("format_", ["float8", "int8"])
def test_rows_of_zeros_stay_zeros(format_):
    pages, zeros = pages_of(format_), torch.zeros(KV_HEADS, 3, HEAD_DIM)
    blocks.store(pages, slots_of(0), 0, zeros, zeros)
    assert all(torch.equal(x, zeros) for x in blocks.load(pages, slots_of(0), 0, 3))


def test_copies_are_whole():
    pages = pages_of("bfloat16")
    pages.slab[:] = torch.randint(0, 256, pages.slab.shape, dtype=torch.uint8)
    before = pages.slab.clone()
    blocks.copy(pages, slots_of(0, 3), slots_of(5, 1))
    before[5], before[1] = before[0], before[3]
    assert torch.equal(pages.slab, before)


def test_nothing_is_nothing():
    pages = pages_of("float16")
    blocks.store(pages, slots_of(), 0, *rows(0))
    blocks.copy(pages, slots_of(), slots_of())
    assert blocks.load(pages, slots_of(), 0, 0)[0].shape == (KV_HEADS, 0, HEAD_DIM)
    assert (pages.slab == 0xFF).all()


def test_what_does_not_fit_is_refused():
    pages = pages_of("float16")
    with pytest.raises(ValueError, match="they hold"):
        blocks.store(pages, slots_of(1), 3, *rows(3))
    with pytest.raises(ValueError, match="expected floats"):
        blocks.store(pages, slots_of(1), 0, *rows(3, head_dim=16))
    with pytest.raises(ValueError, match="expected int32"):
        blocks.load(pages, slots_of(1).long(), 0, 1)
    with pytest.raises(ValueError, match="expected as many"):
        blocks.copy(pages, slots_of(1), slots_of(2, 3))
