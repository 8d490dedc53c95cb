"""Contexts leave the database as caches of transformers, and caches come in as contexts."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

import kvdb
from engine_adapter.transformers.held_cache import HeldCache
from engine_adapter.transformers.support import text_config, windows_of
from kvdb.errors import IntegrityError, InvalidArgument, ShapeError, SpecMismatch, Unsupported

Filled = Sequence[tuple[Tensor, Tensor]]
"""The keys and values of each layer, `[rows, kv_heads, n, head_dim]`."""

CHECKED_TOKENS = 8
"""The number of a cache's last tokens that are computed again, to see that the cache is what the model makes of these tokens."""
PIECE_TOKENS = 1024
"""The number of tokens whose first layer is computed at once."""
DEVIATION_MAX = 0.1
"""The largest relative deviation of such a token: rounding to 16 bits gives less than 0.02, another text about 1."""


def exported(model: PreTrainedModel, spec: kvdb.ModelSpec, source: kvdb.Context | HeldCache) -> DynamicCache:
    """A copy of a context, or of a cache with one row, of this spec, on the model's device; layers with a window keep what they
    need of it. Raises SpecMismatch, InvalidArgument, and what `Session.read` raises."""
    readable, tokens = _readable(source)
    if readable.spec != spec:
        raise SpecMismatch(f"what is to be exported is of {readable.spec}; expected this engine's {spec}")
    cache = DynamicCache(config=text_config(model))
    shape = spec.kv_heads, tokens, spec.head_dim
    for number in range(spec.layers):
        pair = torch.empty(shape, dtype=model.dtype), torch.empty(shape, dtype=model.dtype)
        readable.read(number, 0, tokens, out=pair)
        k, v = (array[None].to(model.device) for array in pair)
        cache.update(k, v, number)
    return cache


def checked_cache(model: PreTrainedModel, spec: kvdb.ModelSpec, cache: Any, tokens: Tensor) -> Filled:
    """The keys and values of a cache of one row that holds these tokens, int64 `[n]`, as the model computes them. A layer
    with a window may have the last ones only; then what the cache holds is not compared yet, see `same_as_held`. Raises
    InvalidArgument, ShapeError, SpecMismatch, Unsupported or IntegrityError for any other."""
    filled = _filled(cache, spec.layers)
    n = cache.get_seq_length()
    if n != len(tokens):
        raise InvalidArgument(
            f"the cache holds {n} tokens, input_ids are {len(tokens)}; expected the ids of all that it holds, which are all of a "
            "generated sequence but its last"
        )
    for number, ((k, v), window) in enumerate(zip(filled, windows_of(model), strict=True)):
        kept = n if window is None or k.shape[2] == n else min(n, window - 1)
        expected = 1, spec.kv_heads, kept, spec.head_dim
        for name, states in (("keys", k), ("values", v)):
            if tuple(states.shape) != expected:
                raise ShapeError(f"the {name} of layer {number} have the shape {tuple(states.shape)}; expected {expected}")
            if states.dtype != model.dtype:
                raise SpecMismatch(f"the {name} of layer {number} are {states.dtype}; expected the model's {model.dtype}")
    if whole(filled, tokens):
        _check_computed(model, filled, tokens)
    return filled


def whole(filled: Filled, tokens: Tensor) -> bool:
    """Whether every layer holds all of these tokens, `[n]`, and none has let some go because of its window."""
    return all(k.shape[2] == len(tokens) for k, _ in filled)


def same_as_held(context: kvdb.Context, filled: Filled) -> kvdb.Context:
    """The context, if a cache whose layers hold the last of its tokens holds the same. Raises IntegrityError for any other cache,
    and drops the context."""
    try:
        for number, pair in enumerate(filled):
            held = tuple(states.cpu() for states in pair)
            stored = tuple(torch.empty_like(states[0]) for states in held)
            context.read(number, context.tokens - held[0].shape[2], context.tokens, out=stored)
            _compare(number, held, [states[None] for states in stored])
    except IntegrityError:
        context.drop()
        raise
    return context


def _readable(source: Any) -> tuple[kvdb.Context | kvdb.Session, int]:
    """What to read, and how many tokens it has. Raises InvalidArgument."""
    if isinstance(source, kvdb.Context):
        return source, source.tokens
    if not isinstance(source, HeldCache) or len(source.rows) != 1:
        what = f"{len(source.rows)} rows" if isinstance(source, HeldCache) else repr(source)
        raise InvalidArgument(f"export_cache was given {what}; expected a context, its name, or one row of open_cache")
    row = source.rows[0]
    return row.session, source.get_seq_length() - row.padding


def _filled(cache: Any, expected: int) -> Filled:
    """The keys and values of a DynamicCache with as many layers as expected. Raises InvalidArgument or Unsupported."""
    if not isinstance(cache, DynamicCache):
        raise InvalidArgument(f"the cache is a {type(cache).__name__}; expected transformers' DynamicCache")
    layers = cast(list[CacheLayerMixin], cache.layers)
    for number, layer in enumerate(layers):
        if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}:
            raise Unsupported(f"layer {number} of the cache is a {type(layer).__name__}; expected keys and values as they are")
    filled = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
    if len(filled) != expected:
        raise InvalidArgument(f"the cache has {len(filled)} layers that hold something; expected {expected}")
    return filled


def _check_computed(model: PreTrainedModel, filled: Filled, tokens: Tensor) -> None:
    """Compute the first layer of all tokens, which depends on nothing but a token and its position, and every layer of the last
    ones over what the cache holds of those before them; and compare. Raises IntegrityError."""
    decoder, config = model.get_decoder(), text_config(model)
    ids = tokens[None].to(model.device)
    with torch.no_grad():
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = ids[:, start : start + PIECE_TOKENS]
            positions = torch.arange(start, start + piece.shape[1], device=model.device)[None]
            first = _FirstLayer(config=config)
            with suppress(_Computed):
                decoder(input_ids=piece, position_ids=positions, past_key_values=first, use_cache=True)
            _compare(0, [states[:, :, start : start + piece.shape[1]] for states in filled[0]], first.computed)
        begin = max(len(tokens) - CHECKED_TOKENS, 0)
        again = DynamicCache(config=config)
        for number, (k, v) in enumerate(filled):
            again.update(k[:, :, :begin], v[:, :, :begin], number)
        decoder(input_ids=ids[:, begin:], past_key_values=again, use_cache=True)
    for number, (held, fresh) in enumerate(zip(filled, _filled(again, len(filled)), strict=True)):
        last = min(len(tokens) - begin, fresh[0].shape[2])  # a window keeps one token less than it sees
        _compare(number, [states[:, :, -last:] for states in held], [states[:, :, -last:] for states in fresh])


class _Computed(Exception):
    """Ends a forward pass once the first layer's keys and values are known."""


class _FirstLayer(DynamicCache):
    """Keeps the first keys and values that come, and ends the forward pass."""

    computed: Sequence[Tensor] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.computed = key_states, value_states
        raise _Computed


def _compare(number: int, held: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """Raises IntegrityError where keys or values of some tokens of a layer, `[1, kv_heads, n, head_dim]`, differ."""
    for name, one, other in zip(("keys", "values"), held, fresh, strict=True):
        check_close(number, name, one[0].transpose(0, 1), other[0].transpose(0, 1))


def check_close(number: int, name: str, held: Tensor, fresh: Tensor) -> None:
    """Raises IntegrityError where some row of what a layer holds, `[rows, ...]`, is not what the model computes."""
    own, expected = (states.float().flatten(1) for states in (held, fresh))
    deviation = float(((own - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-9)).max())
    if not deviation <= DEVIATION_MAX:
        raise IntegrityError(
            f"the {name} of layer {number} are not what the model computes of these tokens: they differ by {deviation:.2f} "
            "of their size; the cache is of another text, model or padding, so call engine.store"
        )
