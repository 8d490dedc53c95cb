"""Contexts leave the database as caches of the model's own kind, and such caches come in as contexts."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import kvdb
from engine_adapter.transformers.exchange import check_close
from engine_adapter.transformers.layers.base import Part, Tokens, copied, needed_from
from engine_adapter.transformers.layers.states import states_of
from engine_adapter.transformers.own.fill import PieceSizes, fill
from engine_adapter.transformers.own.held import OwnCache
from engine_adapter.transformers.own.kept_model import KeptModel, columns_of
from engine_adapter.transformers.own.stored import array
from kvdb.errors import InvalidArgument, ShapeError, SpecMismatch

PIECE_TOKENS = 1024
"""The number of tokens that go at once through the layers that are computed again."""

Imported = tuple[list[Any], dict[int, dict[str, Any]]]
"""What `kvdb.Client.import_context` takes: keys and values of each layer, and states."""


def exported(kept: KeptModel, db: kvdb.Client, spec: kvdb.ModelSpec, source: Any, pieces: PieceSizes) -> DynamicCache:
    """A copy of a context, or of a cache with one row. Tokens behind the last that every layer can be gone on from are computed.
    Raises NotFound, SpecMismatch, InvalidArgument, and what reading raises."""
    if isinstance(source, OwnCache):
        held, padding = source.row()
        return kept.cache([copied(kept.taken(held, 0, padding))], columns_of(held) - padding)
    context = db.get(source) if isinstance(source, str) else source
    if not isinstance(context, kvdb.Context):
        raise InvalidArgument(f"export_cache was given {source!r}; expected a context, its name, or one row of open_cache")
    if context.spec != spec:
        raise SpecMismatch(f"what is to be exported is of {context.spec}; expected this engine's {spec}")
    tokens = torch.from_numpy(context.token_ids().astype(np.int64))
    with context.create_session(tokens) as session:
        cache: DynamicCache = fill(kept, session, tokens, pieces, store=False)
    return cache


def checked_import(kept: KeptModel, cache: Any, tokens: Tensor) -> Imported:
    """What a cache of one row holds of these tokens, int64 `[n]`, as the database takes it; of a layer with a window the
    last ones. Raises InvalidArgument, ShapeError, SpecMismatch or IntegrityError for a cache of another model, of other tokens,
    or with padding."""
    _check_layers(kept, cache)
    n = columns_of(cache)
    if n != len(tokens):
        raise InvalidArgument(
            f"the cache holds {n} tokens, input_ids are {len(tokens)}; expected the ids of all that it holds, which are all of a "
            "generated sequence but its last"
        )
    row = kept.taken(cache, 0)
    _check_shapes(kept, row, n)
    _check_computed(kept, cache, tokens)
    kv: list[Any] = [None] * len(kept.layers)
    states = {}
    for numbers, parts in zip(kept.numbers, row, strict=True):
        for number, part in zip(numbers, parts, strict=True):
            if isinstance(part, Tokens):
                kv[number] = _arrays(part)
            else:
                states[number] = {name: array(held) for name, held in part.items()}
    return kv, states


def _arrays(part: Tokens) -> tuple[Any, ...]:
    k, v, indexer = (None if held is None else held.detach().cpu().contiguous() for held in part)
    return (k, v) if indexer is None else (k, v, indexer)


def _check_layers(kept: KeptModel, cache: Any) -> None:
    """Raises InvalidArgument for what is no cache of the model, filled with one row."""
    if not isinstance(cache, DynamicCache):
        raise InvalidArgument(f"the cache is a {type(cache).__name__}; expected transformers' DynamicCache")
    expected = [type(layer).__name__ for layer in kept.fresh().layers]
    given = [type(layer).__name__ for layer in cache.layers]
    if given != expected:
        number = next((n for n, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), len(expected))
        raise InvalidArgument(
            f"layer {number} of the cache is another than the model's: it has {', '.join(given)}; expected DynamicCache(config="
            f"model.config), which has {', '.join(expected)}"
        )
    if not columns_of(cache):
        raise InvalidArgument("the cache holds nothing; expected one that the model has filled")


def _check_shapes(kept: KeptModel, row: list[tuple[Part, ...]], n: int) -> None:
    """Raises ShapeError or SpecMismatch, naming the layer, for arrays that are not what the model keeps."""
    for number, (kind, parts) in enumerate(zip(kept.kinds, row, strict=True)):
        for description, part in zip(kind.descriptions, parts, strict=True):
            if not isinstance(part, Tokens) or not isinstance(description, kvdb.Attention):
                continue
            expected = description.kv_heads, n - needed_from(description, n), description.key_dim
            if tuple(part.k.shape) != expected:
                raise ShapeError(f"the keys of layer {number} have the shape {tuple(part.k.shape)}; expected {expected}")
            if part.k.dtype != kept.model.dtype:
                raise SpecMismatch(f"the keys of layer {number} are {part.k.dtype}; expected the model's {kept.model.dtype}")


def _check_computed(kept: KeptModel, cache: Any, tokens: Tensor) -> None:
    """Compute the first layers of all tokens, up to the first that keeps keys, and compare. Raises IntegrityError."""
    number = next(n for n, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None)
    fresh = kept.fresh()
    with _stopped_behind(fresh, number):
        for start in range(0, len(tokens), PIECE_TOKENS):
            with suppress(_KeysKnown):
                kept.decode(tokens[start : start + PIECE_TOKENS], fresh)
    for before in range(number):
        states = zip(*(states_of(one.layers[before], 0).values() for one in (cache, fresh)), strict=True)
        for held, computed in states:
            check_close(before, "states", held.reshape(1, -1), computed.reshape(1, -1))
    check_close(number, "keys", *(_keys_of(one.layers[number]) for one in (cache, fresh)))


def _keys_of(layer: Any) -> Tensor:
    """The keys of a layer's only row, `[tokens, heads, dim]`."""
    keys: Tensor = layer.keys
    return keys[0].transpose(0, 1)


class _KeysKnown(Exception):
    """Ends a forward pass once the keys of a layer are known."""


@contextmanager
def _stopped_behind(cache: Any, number: int) -> Iterator[None]:
    """A pass through the model ends, by _KeysKnown, once this layer of the cache has its keys."""
    layer = cache.layers[number]
    update = layer.update

    def ending(*args: Any, **kwargs: Any) -> Any:
        update(*args, **kwargs)
        raise _KeysKnown

    layer.update = ending
    try:
        yield
    finally:
        del layer.update
