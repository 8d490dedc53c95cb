"""Values of `kvdb.types` as messages of the wire, and back.

`kvdb.rpc.kv_chunk` has the message whose arrays are not copied, and `kvdb.rpc.query_options` the options of a query.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np

import kvdb.types.tenants as tenants
import kvdb.validate as validate
from kvdb.errors import DtypeError, InvalidArgument, ShapeError, SpecError
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import (
    ERROR,
    MEASURES,
    SCALING_LENGTH_MAX,
    Array,
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    ModelSpec,
    Placed,
    Positions,
    PromptPart,
    Retention,
    Rope,
    SegmentStatistics,
    Tokens,
)

DIMENSIONS_MAX = 8
SEGMENT_ARRAYS = ("queries", *MEASURES, "audits", ERROR)
TOKEN_DTYPE = np.dtype("<i4")
POSITION_DTYPE = np.dtype("<i8")

_INTEGERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_NUMBERS = [*_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | {name: np.dtype(name) for name in _NUMBERS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def wire_dtype(name: str) -> np.dtype[Any] | None:
    """The dtype of this name, None for one that the wire does not carry."""
    return _DTYPES.get(name)


def put_head(message: pb.Array | pb.KvChunk, array: Array) -> None:
    """Write dtype and shape of an array into its message. Raises DtypeError for a dtype that the wire does not carry."""
    name = _NAMES.get(array.dtype)
    if name is None:
        raise DtypeError(f"an array has the dtype {array.dtype}; expected float32, float16 or bfloat16, as the model's spec says")
    message.dtype = name
    message.shape.extend(array.shape)


def to_array(array: Array) -> pb.Array:
    """The message of an array of numbers, of any shape; the database checks whether it suits the model. Raises DtypeError."""
    message = pb.Array()
    put_array(message, array)
    return message


def put_array(message: pb.Array, array: Array) -> None:
    """Write an array into a message inside of another, which saves a copy. Raises DtypeError."""
    put_head(message, array)
    message.data = array.tobytes()


def from_array(message: pb.Array) -> Array:
    """The array of a message, read-only, over the message's bytes. Raises DtypeError or ShapeError."""
    return build_array(message.dtype, tuple(message.shape), message.data)


def build_array(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Array:
    """An array over `data`, without a copy. Raises DtypeError or ShapeError if data, dtype and shape do not fit together."""
    kind = wire_dtype(dtype)
    if kind is None:
        raise DtypeError(f"an array has the dtype {dtype!r:.100}; expected one of {', '.join(_DTYPES)}")
    if len(shape) <= DIMENSIONS_MAX and math.prod(shape) * kind.itemsize == len(data):
        with suppress(ValueError):  # numpy has limits of its own, also for arrays without elements
            return np.frombuffer(data, kind).reshape(shape)
    raise ShapeError(
        f"an array of the shape {shape[:DIMENSIONS_MAX]} and dtype {dtype} has {len(data)} bytes of data; "
        "expected as many as both say"
    )


def to_arrays(arrays: Mapping[str, Array]) -> dict[str, pb.Array]:
    """The messages of named arrays. Raises DtypeError."""
    return {name: to_array(array) for name, array in arrays.items()}


def from_arrays(message: Mapping[str, pb.Array]) -> dict[str, Array]:
    """Named arrays. Raises DtypeError or ShapeError."""
    return {name: from_array(array) for name, array in message.items()}


def to_tokens(tokens: Tokens) -> bytes:
    return tokens.astype(TOKEN_DTYPE, copy=False).tobytes()


def from_tokens(data: bytes) -> Tokens:
    """int32 `[n]`. Raises InvalidArgument."""
    if len(data) % TOKEN_DTYPE.itemsize:
        raise InvalidArgument(f"tokens have {len(data)} bytes; expected a multiple of 4, the int32 ids of one sequence")
    return np.frombuffer(data, TOKEN_DTYPE).astype(np.int32, copy=False)


def to_positions(positions: Positions) -> bytes:
    return positions.astype(POSITION_DTYPE, copy=False).tobytes()


def from_positions(data: bytes) -> Positions:
    """int64 `[n]`, read-only. Raises InvalidArgument."""
    if len(data) % POSITION_DTYPE.itemsize:
        raise InvalidArgument(f"positions have {len(data)} bytes; expected a multiple of 8, an int64 for each token")
    return np.frombuffer(data, POSITION_DTYPE).astype(np.int64, copy=False)


def to_part(part: PromptPart) -> pb.Part:
    """The message of a part whose source is a context's name, or token ids."""
    if isinstance(part.source, str):
        return pb.Part(context=part.source, visible=part.visible, at=part.at)
    return pb.Part(tokens=to_tokens(part.source), visible=part.visible, at=part.at)


def from_part(message: pb.Part) -> PromptPart:
    """Raises InvalidArgument for a part without a source."""
    source = message.WhichOneof("source")
    if source is None:
        raise InvalidArgument("a part names no context and holds no tokens; expected one of the two")
    return PromptPart(
        source=message.context if source == "context" else from_tokens(message.tokens),
        visible=message.visible if message.HasField("visible") else None,
        at=message.at if message.HasField("at") else None,
    )


def to_placed(placed: Placed) -> pb.Placed:
    return pb.Placed(begin=placed.begin, end=placed.end, kind=placed.kind)


def from_placed(message: pb.Placed) -> Placed:
    return Placed(message.begin, message.end, message.kind)


def to_spec(spec: ModelSpec) -> pb.ModelSpec:
    if not spec.uniform:
        text = json.dumps(spec.to_dict()["layers"])
        return pb.ModelSpec(name=spec.name, dtype=spec.dtype, fingerprint=spec.fingerprint, descriptions=text)
    return pb.ModelSpec(
        name=spec.name,
        layers=spec.layers,
        q_heads=spec.q_heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        rope=None if spec.rope is None else _to_rope(spec.rope),
        fingerprint=spec.fingerprint,
        scale=spec.scale,
    )


def from_spec(message: pb.ModelSpec) -> ModelSpec:
    """Raises SpecError for a spec that cannot exist."""
    if message.descriptions:
        try:
            layers = list(json.loads(message.descriptions))
        except (ValueError, TypeError, RecursionError) as error:
            raise SpecError(f"the layers of {message.name!r:.100} cannot be read: {error!s:.100}") from None
        values = {"name": message.name, "layers": layers, "dtype": message.dtype, "fingerprint": message.fingerprint}
        return ModelSpec.from_dict(values)
    return ModelSpec(
        name=message.name,
        layers=message.layers,
        q_heads=message.q_heads,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        rope=_from_rope(message.rope) if message.HasField("rope") else None,
        fingerprint=message.fingerprint,
        scale=message.scale if message.HasField("scale") else None,
    )


def to_info(info: ContextInfo) -> pb.ContextInfo:
    return pb.ContextInfo(**vars(info) | {"spec": to_spec(info.spec), "metadata": json.dumps(info.metadata)})


def from_info(message: pb.ContextInfo) -> ContextInfo:
    expires = message.expires if message.HasField("expires") else None
    changed = {
        "spec": from_spec(message.spec),
        "expires": expires,
        "metadata": from_metadata(message.metadata),
        "shared_with": tuple(message.shared_with),
    }
    return ContextInfo(**_fields(ContextInfo, message) | changed)


def to_retention(retention: Retention) -> pb.Retention:
    metadata = json.dumps(dict(retention.metadata)) if retention.metadata else ""
    kept = pb.Retention(durability=retention.durability, ttl=retention.ttl, metadata=metadata, pinned=retention.pinned)
    if retention.format is not None:
        kept.format = retention.format
    return kept


def from_retention(message: pb.Retention) -> Retention:
    """Raises InvalidArgument for metadata that cannot be."""
    ttl = message.ttl if message.HasField("ttl") else None
    held = message.format if message.HasField("format") else None
    return Retention(message.durability or None, ttl, from_metadata(message.metadata), message.pinned, held)


def to_update(name: str, change: ContextUpdate) -> pb.UpdateContextRequest:
    metadata = None if change.metadata is None else json.dumps(change.metadata)
    shared = None if change.shared_with is None else pb.Names(names=change.shared_with)
    pinned, ttl, new = change.pinned, change.ttl, change.name
    return pb.UpdateContextRequest(name=name, pinned=pinned, ttl=ttl, metadata=metadata, new_name=new, shared_with=shared)


def from_update(message: pb.UpdateContextRequest) -> ContextUpdate:
    """Raises InvalidArgument for what cannot be."""
    pinned = message.pinned if message.HasField("pinned") else None
    ttl = validate.ttl(message.ttl) if message.HasField("ttl") else None
    metadata = from_metadata(message.metadata) if message.HasField("metadata") else None
    name = validate.name(message.new_name) if message.HasField("new_name") else None
    shared = tenants.shared_with(message.shared_with.names) if message.HasField("shared_with") else None
    return ContextUpdate(pinned, ttl, metadata, name, shared)


def from_metadata(text: str) -> Mapping[str, Any]:
    """What a JSON object says, nothing for "". Raises InvalidArgument for another text."""
    try:
        return validate.metadata(json.loads(text) if text else {})
    except (ValueError, RecursionError):
        raise InvalidArgument(f"metadata is {text!r:.200}; expected a JSON object") from None


def to_statistics(statistics: ContextStatistics) -> pb.ContextStatisticsReply:
    return pb.ContextStatisticsReply(segments=map(_to_segment, statistics.segments))


def from_statistics(message: pb.ContextStatisticsReply) -> ContextStatistics:
    """The statistics without the name of the context, which the message does not say. Raises DtypeError or ShapeError."""
    return ContextStatistics("", tuple(map(_from_segment, message.segments)))


def _fields(cls: type[Any], message: Any) -> dict[str, Any]:
    """The fields of a message by the names of a dataclass's fields."""
    return {field.name: getattr(message, field.name) for field in fields(cls)}


def _to_segment(segment: SegmentStatistics) -> pb.SegmentStatistics:
    arrays = {name: to_array(getattr(segment, name)) for name in SEGMENT_ARRAYS}
    return pb.SegmentStatistics(segment=segment.segment, tokens=segment.tokens, **arrays)


def _from_segment(message: pb.SegmentStatistics) -> SegmentStatistics:
    arrays = {name: from_array(getattr(message, name)) for name in SEGMENT_ARRAYS}
    return SegmentStatistics(segment=message.segment, tokens=message.tokens, **arrays)


def _to_rope(rope: Rope) -> pb.Rope:
    scaling = json.dumps(dict(rope.scaling)) if rope.scaling else ""
    return pb.Rope(theta=rope.theta, rotary_dims=rope.rotary_dims, layout=rope.layout, scaling=scaling)


def _from_rope(message: pb.Rope) -> Rope:
    text = message.scaling
    if len(text) > SCALING_LENGTH_MAX:
        raise SpecError(f"Rope.scaling has {len(text)} characters; expected at most {SCALING_LENGTH_MAX}")
    try:
        scaling: Any = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise SpecError(f"Rope.scaling is {text!r:.100}; expected a JSON object ({error})") from None
    if not isinstance(scaling, dict):
        raise SpecError(f"Rope.scaling is {text!r:.100}; expected a JSON object")
    rotary_dims = message.rotary_dims if message.HasField("rotary_dims") else None
    return Rope(message.theta, rotary_dims, message.layout, tuple(scaling.items()))
