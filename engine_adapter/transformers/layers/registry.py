"""Which kind a layer of a model's cache is of: `kind_of`.

What a layer keeps is known only once the model has filled it; a config does not say it in a way that all models share. So a few
tokens go through the model, and the tensors that they leave are looked at.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils

import kvdb
from engine_adapter.transformers.layers.attention import AttentionLayer
from engine_adapter.transformers.layers.base import LayerKind
from engine_adapter.transformers.layers.compressed import CompressedLayer
from engine_adapter.transformers.layers.forms import KeysAsValues, Latents, OwnValues, TokenForm
from engine_adapter.transformers.layers.hybrid import HybridLayer
from engine_adapter.transformers.layers.indexed import Dsa, IndexedLayer, IndexerAlone, IndexerKeys, MiniMax
from engine_adapter.transformers.layers.nothing import NoLayer
from engine_adapter.transformers.layers.states import StateLayer, described, states_of
from kvdb.errors import SpecError, Unsupported

TOKENS = ("DynamicLayer", "DynamicSlidingWindowLayer")
INDEXED: dict[str, type[Dsa] | type[MiniMax]] = {"DynamicIndexedLayer": Dsa, "MiniMaxM3VLSparseCacheLayer": MiniMax}
STATES = ("LinearAttentionLayer",)
HYBRID = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
COMPRESSED = ("DeepseekV4HCACache", "DeepseekV4CSACache")
NOTHING = ("DummyLayer",)
KNOWN = (*TOKENS, *INDEXED, *STATES, *HYBRID, *COMPRESSED, *NOTHING)
"""The names of the classes, because some are defined in the file of their model; see `_is_of_transformers`."""


class Heads(NamedTuple):
    """What a model says of the queries of one layer. sinks: whether each of its heads has a sink logit."""

    q_heads: int
    scale: float | None = None
    sinks: bool = False


class CacheFacts(NamedTuple):
    """A layer of a cache that has read some tokens, and what is to be known of it.

    number: of the layer. latent: the numbers of a latent of multi-head latent attention, None without. indexer: heads, and how
    many tokens a query selects.
    """

    number: int
    layer: Any
    heads: Heads
    latent: int | None = None
    indexer: tuple[int, int] | None = None


def kind_of(facts: CacheFacts) -> LayerKind:
    """The kind of a layer. Raises Unsupported, naming the layer, for one that kvdb does not know or cannot store."""
    name = type(facts.layer).__name__
    if name not in KNOWN or not _is_of_transformers(facts.layer):
        raise Unsupported(
            f"layer {facts.number} caches a {name}, which kvdb cannot take and hand back; it knows {', '.join(KNOWN)}"
        )
    try:
        return _kind_of(name, facts)
    except SpecError as error:
        raise Unsupported(f"layer {facts.number}, a {name}, keeps what kvdb cannot store: {error}") from None


def _kind_of(name: str, facts: CacheFacts) -> LayerKind:
    if name in NOTHING:
        return NoLayer()
    if name in STATES:
        return StateLayer(_state(facts))
    if name in INDEXED:
        return _indexed(facts, INDEXED[name]())
    attention = AttentionLayer(*_attention(facts))
    if name in HYBRID:
        return HybridLayer(attention, StateLayer(_state(facts)))
    return CompressedLayer(attention, facts.layer) if name in COMPRESSED else attention


def _attention(facts: CacheFacts, indexer: kvdb.Indexer | None = None) -> tuple[kvdb.Attention, TokenForm]:
    """What a layer keeps of each token, and how."""
    keys, values = facts.layer.keys, facts.layer.values
    if keys is None or values is None:
        raise Unsupported(f"layer {facts.number} does not put its keys into its cache; kvdb works with models whose layers do")
    form = _form(facts, keys, values)
    whole = form.joined(keys[0], values[0])
    kv_heads, _, key_dim = whole.k.shape
    value_dim = whole.v.shape[-1] if whole.v is not None else facts.latent or key_dim
    description = kvdb.Attention(
        q_heads=facts.heads.q_heads if facts.heads.q_heads % kv_heads == 0 else kv_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=facts.heads.scale,
        window=getattr(facts.layer, "sliding_window", None),
        sinks=facts.heads.sinks,
        values=form.values,
        indexer=indexer,
    )
    return description, form


def _form(facts: CacheFacts, keys: Tensor, values: Tensor) -> TokenForm:
    if facts.latent == keys.shape[-1] and keys.shape[1] == values.shape[1] == 1:
        return Latents(facts.latent)
    return KeysAsValues() if keys.shape == values.shape and torch.equal(keys, values) else OwnValues()


def _indexed(facts: CacheFacts, keys: IndexerKeys) -> LayerKind:
    if getattr(facts.layer, "indexer_position_ids", None) is not None:
        raise Unsupported(f"layer {facts.number} keeps positions of its indexer, which kvdb does not store")
    held = keys.of(facts.layer)
    if held is None:
        return AttentionLayer(*_attention(facts))
    heads, top = facts.indexer or (1, 1)
    dim = held.shape[-1]
    if facts.layer.keys is None:
        return IndexerAlone(kvdb.Attention(heads, 1, dim, values="keys"), keys)
    description, form = _attention(facts, kvdb.Indexer(heads, dim, top))
    return IndexedLayer(description, form, keys)


def _state(facts: CacheFacts) -> kvdb.State:
    return described(states_of(facts.layer, 0))


def _is_of_transformers(layer: Any) -> bool:
    """Whether the class is transformers' own, of its file of caches or of a model."""
    home = type(layer).__module__
    return home == cache_utils.__name__ or home.startswith("transformers.models.")
