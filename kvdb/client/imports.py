"""An import, from the caller's arrays to the transport."""

from collections.abc import Iterable, Mapping
from typing import Any

import kvdb.validate as validate
from kvdb.client.arrays import keys_values, to_numpy
from kvdb.client.transport import ImportTransport
from kvdb.errors import InvalidArgument, LayerError, ShapeError
from kvdb.types import Array, ContextInfo, ModelSpec


def import_all(
    writer: ImportTransport,
    tokens: int,
    kv: Iterable[Any],
    queries: Iterable[Any] | None,
    states: Mapping[int, Any] | None = None,
) -> ContextInfo:
    """Hand an import what every layer keeps, and end it: with a commit, or with an abort where anything raises.

    tokens: how many the context has. kv, queries, states: as in `Client.import_context`, whose errors it raises.
    """
    spec = writer.spec
    done = False
    try:
        layers = 0
        for pair in validate.iterable("kv", kv, "one pair (k, v) for each layer"):
            if layers < spec.layers:
                _write(writer, layers, pair, tokens)
            layers += 1
        if layers != spec.layers:
            raise LayerError(f"kv holds {layers} layers; expected {spec.layers}, those of {spec.name}")
        _put_states(writer, states or {}, tokens)
        if queries is not None:
            _sample(writer, queries, spec)
        info = writer.commit()
        done = True
    finally:
        if not done:
            writer.abort()
    return info


def _write(writer: ImportTransport, layer: int, given: Any, tokens: int) -> None:
    """Hand over what one layer keeps of all tokens. Raises what `checked_pair` raises, and LayerError."""
    place = writer.spec.places[layer]
    if place is None or writer.spec.kept[place].layer != layer:
        if given is not None:
            raise LayerError(f"kv of layer {layer} is a {type(given).__name__}; expected None, as it keeps no keys and values")
        return
    three = layer in writer.spec.indexer_places and isinstance(given, tuple | list) and len(given) == 3
    pair, indexer = (given[:2], given[2]) if three else (given, None)
    k, v = checked_pair(pair, layer, tokens, fewer=bool(writer.spec.shape(place).window))
    first = tokens - k.shape[1]  # a layer with a window may come without the tokens that no query sees
    begin = max(first, writer.start)
    if begin < tokens:
        writer.write(layer, k[:, begin - first :], v[:, begin - first :], start=begin if first else None)
        if indexer is not None:
            keys, none = checked_pair((indexer, None), layer, tokens)
            writer.write(layer, keys[:, writer.start :], none[:, writer.start :], indexer=True)


def _put_states(writer: ImportTransport, states: Mapping[int, Any], tokens: int) -> None:
    """Hand over states: by layer for all tokens, or by position. Raises InvalidArgument, and what `put_state` raises."""
    if not isinstance(states, Mapping):
        raise InvalidArgument(f"states is a {type(states).__name__}; expected arrays by layer, or those by position")
    of_layers = any(isinstance(name, str) for one in states.values() if isinstance(one, Mapping) for name in one)
    for position, layers in {tokens: states}.items() if of_layers else states.items():
        for layer, arrays in layers.items():
            writer.put_state(layer, {name: to_numpy(array) for name, array in arrays.items()}, position)


def checked_pair(given: Any, layer: int, n: int, *, fewer: bool = False) -> tuple[Array, Array]:
    """The keys and values of all n tokens of a layer, `[kv_heads, n, head_dim]`. fewer: whether they may be of the last tokens
    alone. Raises InvalidArgument or ShapeError."""
    try:
        k, v = given
    except (TypeError, ValueError):
        raise InvalidArgument(f"kv of layer {layer} is a {type(given).__name__}; expected a pair (k, v)") from None
    pair = keys_values(k, v)
    for what, array in zip("kv", pair, strict=True):
        if array.ndim != 3 or array.shape[1] > n or (array.shape[1] < n and not fewer):
            raise ShapeError(
                f"{what} of layer {layer} has the shape {array.shape}; expected (kv_heads, {n}, head_dim), all {n} tokens"
            )
    return pair


def _sample(writer: ImportTransport, queries: Iterable[Any], spec: ModelSpec) -> None:
    layers = 0
    for q in validate.iterable("queries", queries, "one sample or None for each layer"):
        if q is not None:
            writer.sample(layers, to_numpy(q))
        layers += 1
    if layers != spec.layers:
        raise LayerError(f"queries holds {layers} layers; expected {spec.layers}, one sample or None for each of {spec.name}")
