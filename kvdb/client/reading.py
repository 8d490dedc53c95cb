"""KV read back into the caller's arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import kvdb.validate as validate
from kvdb.client.arrays import to_numpy
from kvdb.errors import InvalidArgument
from kvdb.types import Array, KeysValues

Read = Callable[[Sequence[int], Sequence[KeysValues] | None], list[KeysValues]]


def read_layers(layers: Any, out: Any, read: Read) -> Any:
    """What `read` gives of one layer, a pair (k, v), or of several, a list of pairs. out: what to write into instead, of the same
    form; it is returned. Raises InvalidArgument, DtypeError, and what `read` raises."""
    if validate.is_whole(layers):
        pairs = read([int(layers)], None if out is None else [_buffers(out)])
        return _pair(*pairs[0]) if out is None else out
    numbers = list(validate.iterable("layers", layers, "the number of a layer, or of several"))
    if out is None:
        return [_pair(*pair) for pair in read(numbers, None)]
    buffers = [_buffers(pair) for pair in validate.iterable("out", out, "one pair (k, v) for each layer")]
    if len(buffers) != len(numbers):
        raise InvalidArgument(f"out has {len(buffers)} pairs; expected {len(numbers)}, one for each layer that is read")
    read(numbers, buffers)
    return out


def read_range(start: Any, stop: Any) -> tuple[int, int | None]:
    """The tokens [start, stop), None for all that there are. Raises PositionError for what are no numbers of tokens."""
    return validate.position("start", start), None if stop is None else validate.position("stop", stop)


def _buffers(given: Any) -> KeysValues:
    try:
        k, v = given
    except (TypeError, ValueError):
        raise InvalidArgument(f"out is a {type(given).__name__}; expected a pair (k, v) of arrays for each layer") from None
    keys = _memory(k)
    return keys, keys[..., :0] if v is None else _memory(v)


def _pair(k: Array, v: Array) -> tuple[Array, Array | None]:
    """Keys and values as a caller gets them: None for values without numbers, which lie in the keys, or do not exist."""
    return k, v if v.shape[-1] else None


def _memory(array: Any) -> Array:
    """The caller's array itself, as numpy sees it. Raises InvalidArgument for a tensor that lies elsewhere."""
    if not getattr(array, "is_cpu", True):
        raise InvalidArgument(f"out lies on {array.device}; expected main memory")
    return to_numpy(array)
