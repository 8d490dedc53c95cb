"""Packings of blocks, learnt from what an operation writes."""

import pytest
import torch

from engine_adapter.vllm.layout import PackedLayout
from kvdb.errors import Unsupported
from tests.engine_adapter.vllm.conftest import BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packing_is_learnt_in_any_dtype(packing, spec, dtype):
    layout = PackedLayout.learn(packing.write, packing.cache(dtype), spec.kv_heads, BLOCK, spec.head_dim)
    assert torch.equal(layout.offsets, packing.order)


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 16), (5, 7), (16, 33), (17, 40), (39, 40)])
def test_it_reads_what_the_operation_wrote(packing, layout, make_kv, spec, start, stop):
    kv = make_kv(spec, 40)
    cache = packing.filled(kv.k[0], kv.v[0], [9, 2, 5])
    k, v = layout.read(cache, [9, 2, 5], start, stop)
    assert torch.equal(k, torch.as_tensor(kv.k[0][:, start:stop]))
    assert torch.equal(v, torch.as_tensor(kv.v[0][:, start:stop]))


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (5, 7), (16, 33), (17, 40)])
def test_it_writes_as_the_operation_does(packing, layout, make_kv, spec, start, stop):
    held, new = make_kv(spec, 40, seed=1), make_kv(spec, 40, seed=2)
    cache = packing.filled(held.k[0], held.v[0], [9, 2, 5])
    k, v = (torch.as_tensor(array[0]).clone() for array in (held.k, held.v))
    k[:, start:stop], v[:, start:stop] = (torch.as_tensor(array[0][:, start:stop]) for array in (new.k, new.v))
    layout.write(cache, [9, 2, 5], start, (k[:, start:stop], v[:, start:stop]))
    assert torch.equal(cache, packing.filled(k, v, [9, 2, 5]))


def test_blocks_of_other_numbers_are_refused(packing, spec):
    with pytest.raises(Unsupported, match="contiguous"):
        PackedLayout.learn(packing.write, packing.cache(), spec.kv_heads, BLOCK * 2, spec.head_dim)
    with pytest.raises(Unsupported, match="contiguous"):
        PackedLayout.learn(packing.write, packing.cache().transpose(0, 1), spec.kv_heads, BLOCK, spec.head_dim)


def test_an_operation_that_changes_numbers_is_refused(packing, spec):
    def halve(key, value, cache, slots):
        packing.write(key / 2, value, cache, slots)

    with pytest.raises(Unsupported, match="another form"):
        PackedLayout.learn(halve, packing.cache(), spec.kv_heads, BLOCK, spec.head_dim)
