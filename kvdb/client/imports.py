"""An import, from the caller's arrays to the transport."""

from collections.abc import Iterable
from typing import Any

import kvdb.validate as validate
from kvdb.client.arrays import to_numpy
from kvdb.client.transport import ImportTransport
from kvdb.errors import InvalidArgument, LayerError, ShapeError
from kvdb.types import Array, ContextInfo, ModelSpec


def import_all(writer: ImportTransport, tokens: int, kv: Iterable[Any], queries: Iterable[Any] | None) -> ContextInfo:
    """Hand an import the KV and the queries of every layer, and end it: with a commit, or with an abort where anything raises.

    tokens: how many the context has. kv, queries: as in `Client.import_context`, whose errors it raises.
    """
    spec = writer.spec
    done = False
    try:
        layers = 0
        for pair in validate.iterable("kv", kv, "one pair (k, v) for each layer"):
            k, v = checked_pair(pair, layers, tokens)
            if writer.start < tokens:
                writer.write(layers, k[:, writer.start :], v[:, writer.start :])
            layers += 1
        if layers != spec.layers:
            raise LayerError(f"kv holds {layers} layers; expected {spec.layers}, those of {spec.name}")
        if queries is not None:
            _sample(writer, queries, spec)
        info = writer.commit()
        done = True
    finally:
        if not done:
            writer.abort()
    return info


def checked_pair(given: Any, layer: int, n: int) -> tuple[Array, Array]:
    """The keys and values of all n tokens of a layer, `[kv_heads, n, head_dim]`. Raises InvalidArgument or ShapeError."""
    try:
        k, v = given
    except (TypeError, ValueError):
        raise InvalidArgument(f"kv of layer {layer} is a {type(given).__name__}; expected a pair (k, v)") from None
    pair = to_numpy(k), to_numpy(v)
    for what, array in zip("kv", pair, strict=True):
        if array.ndim != 3 or array.shape[1] != n:
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
