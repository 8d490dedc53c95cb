"""The layout of an engine's caches, told by what vLLM says of its attention."""

from types import SimpleNamespace

import pytest
import torch

from engine_adapter.vllm.packing import block_size_of, layers_of, layout_of
from kvdb.errors import Unsupported
from tests.engine_adapter.vllm.conftest import BLOCK

BLOCKS, LAYERS = 4, 3
NAMES = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]


class FullAttentionSpec:
    block_size = BLOCK


class SlidingWindowSpec:
    block_size = BLOCK


def caches_of(name, spec):
    """Views of all layers, `[blocks, kv_heads, tokens, keys and values]` each, into memory in the order of the name."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": spec.kv_heads, "N": BLOCK, "C": 2 * spec.head_dim}
    memory = torch.zeros([sizes[dimension] for dimension in name])
    logical = memory.permute([name.index(dimension) for dimension in "LBHNC"])
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(LAYERS)}


def config_of(backend, name, caches, spec):
    """What kvdb reads of vLLM's config, whose attention writes as vLLM's own operations for GPUs do."""
    attention = SimpleNamespace(
        num_kv_heads=spec.kv_heads, head_size=spec.head_dim, get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend)
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(caches, attention)),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(name=name)),
    )


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("name", NAMES)
def test_a_named_layout_is_read_and_written_where_the_kernels_look(name, backend, spec, make_kv):
    caches, kv = caches_of(name, spec), make_kv(spec, 20)
    layout = layout_of(config_of(backend, name, caches, spec), caches, BLOCK)
    k, v = torch.as_tensor(kv.k[0]), torch.as_tensor(kv.v[0])
    cache = [*caches.values()][1]
    layout.write(cache, [2, 0], 0, (k, v))
    of_kernels_k, of_kernels_v = cache.transpose(1, 2).split(spec.head_dim, dim=-1)  # [blocks, tokens, heads, head_dim]
    for token in range(20):
        block, place = [2, 0][token // BLOCK], token % BLOCK
        assert torch.equal(of_kernels_k[block, place], k[:, token])
        assert torch.equal(of_kernels_v[block, place], v[:, token])
    assert all(torch.equal(a, b) for a, b in zip(layout.read(cache, [2, 0], 3, 20), (k[:, 3:], v[:, 3:]), strict=True))
    others = [caches[layer] for layer in caches if caches[layer] is not cache]
    assert not any(other.any() for other in others)


@pytest.mark.parametrize(
    ("said", "true"), [("LHBNC", "LHBNC"), ("BHLNC", "BHLNC"), ("LBHNC", "LBNHC"), ("LBNHC", "LBHNC"), ("NHD", "LBNHC")]
)
def test_blocks_in_pieces_and_names_that_lie_are_refused(said, true, spec):
    caches = caches_of(true, spec)
    with pytest.raises(Unsupported, match=said):
        layout_of(config_of("FLASH_ATTN", said, caches, spec), caches, BLOCK)


def test_other_backends_are_refused(spec):
    caches = caches_of("LBHNC", spec)
    with pytest.raises(Unsupported, match="computed by FLEX_ATTENTION"):
        layout_of(config_of("FLEX_ATTENTION", "LBHNC", caches, spec), caches, BLOCK)


def test_caches_of_every_token_alone_are_known():
    def config(*specs):
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    assert block_size_of(config(FullAttentionSpec())) == BLOCK
    with pytest.raises(Unsupported, match="SlidingWindowSpec"):
        block_size_of(config(SlidingWindowSpec()))
    with pytest.raises(Unsupported, match="2 kinds"):
        block_size_of(config(FullAttentionSpec(), SlidingWindowSpec()))


def test_layers_are_counted_by_their_names(spec):
    caches = caches_of("LBHNC", spec)
    assert [*layers_of(caches).values()] == [*range(LAYERS)]
    with pytest.raises(Unsupported, match="cannot tell"):
        layers_of({name.replace("1", "7"): cache for name, cache in caches.items()})
    with pytest.raises(Unsupported, match="several forms"):
        layers_of({name: cache[: 1 + int(name[13])] for name, cache in caches.items()})
