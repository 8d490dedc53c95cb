"""Checks of a caller's arguments; each raises the error that says what was given and what was expected."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes.registry as registry
import kvdb.codecs.registry as codecs
from kvdb.errors import (
    DtypeError,
    InvalidArgument,
    KvdbError,
    LayerError,
    NonFiniteError,
    PositionError,
    ShapeError,
    SpecError,
    SpecMismatch,
)
from kvdb.types import DURABILITIES, Array, Float32, LayerShape, ModelSpec, PromptPart, Retention, State, Tokens

# size: every check of an argument, each of a few lines
NAME_LENGTH_MAX = 1024
METADATA_BYTES_MAX = 16 << 10
POSITION_MAX = 1 << 53
"""The last position that float64 distinguishes from the next; the angles of a move are computed in float64."""


def layer(spec: ModelSpec, number: Any) -> None:
    """Raises LayerError unless the spec has a layer of this number."""
    if not is_whole(number) or not 0 <= number < spec.layers:
        raise LayerError(f"layer is {number!r}; expected 0 to {spec.layers - 1}, the layers of {spec.name}")


def place(spec: ModelSpec, number: Any, *, indexer: bool = False) -> int:
    """Where what a layer reads stands in `ModelSpec.kept`: its keys and values, or its indexer's keys. Raises LayerError for a
    number that no layer has, for a layer that keeps a state, and for one without an indexer."""
    layer(spec, number)
    found = spec.indexer_places.get(number) if indexer else spec.places[number]
    if found is None and indexer:
        raise LayerError(f"layer {number} of {spec.name} has no indexer; those that have one are described with kvdb.Indexer")
    if found is None:
        raise LayerError(f"layer {number} of {spec.name} keeps a state, and no keys and values; ask for it with state")
    return found


def own_place(spec: ModelSpec, number: Any, *, indexer: bool = False) -> int:
    """`place` of a layer that keeps keys and values itself. Raises LayerError for any other."""
    found = place(spec, number, indexer=indexer)
    if (kept := spec.kept[found].layer) != number:
        raise LayerError(f"layer {number} of {spec.name} reads what layer {kept} keeps; hand keys and values in there")
    return found


def skipped(shape: LayerShape, start: Any, length: int, n: int, layer_number: int) -> int:
    """How many tokens a layer of so many goes over before the n that are handed in from `start` on, None for none. A layer with
    a window may go over those that no later query sees. Raises PositionError for anything else."""
    if start is None or not shape.window or not is_whole(start) or start <= length:
        start_of(start, length, layer_number)
        return 0
    if n < shape.window - 1:
        raise PositionError(
            f"layer {layer_number} was given {n} tokens from {start} on, and holds {length}; expected start={length}, or at "
            f"least the {shape.window - 1} tokens before those that come, which its window of {shape.window} sees"
        )
    return int(start) - length


def state_layer(spec: ModelSpec, number: Any) -> State:
    """What a layer says of its state. Raises LayerError for one that keeps none."""
    layer(spec, number)
    found = spec.all_layers[number]
    if not isinstance(found, State):
        raise LayerError(f"layer {number} of {spec.name} keeps no state; those that do are described by kvdb.State")
    return found


def state(spec: ModelSpec, number: Any, arrays: Any) -> dict[str, Array]:
    """The arrays of a layer's state, copied. Raises LayerError, InvalidArgument, ShapeError or DtypeError, which name the
    layer."""
    expected = state_layer(spec, number).by_name
    if not isinstance(arrays, Mapping) or set(arrays) != set(expected):
        given = sorted(map(str, arrays)) if isinstance(arrays, Mapping) else f"{arrays!r:.100}"
        raise InvalidArgument(f"the state of layer {number} is {given}; expected arrays named {', '.join(expected)}")
    kept = {}
    for name, (shape, dtype) in expected.items():
        array = np.array(arrays[name])  # a copy, which nobody writes
        if array.dtype != dtype:
            raise DtypeError(f"{name} of the state of layer {number} has the dtype {array.dtype}; expected {dtype}")
        if array.ndim != len(shape) or any(n not in {given, None} for given, n in zip(array.shape, shape, strict=True)):
            raise ShapeError(f"{name} of the state of layer {number} has the shape {array.shape}; expected {shape}")
        array.flags.writeable = False
        kept[name] = array
    return kept


def sinks(shape: LayerShape, number: int, given: Array) -> Float32:
    """The logits of a layer's sinks, copied. Raises InvalidArgument for a layer without sinks, ShapeError, DtypeError or
    NonFiniteError, which name the layer."""
    if not shape.sinks:
        raise InvalidArgument(f"layer {number} has no sinks; those that have some are described with sinks=True")
    if given.shape != (shape.q_heads,):
        raise ShapeError(
            f"the sinks of layer {number} have the shape {given.shape}; expected ({shape.q_heads},), one a query head"
        )
    if given.dtype != np.float32:
        raise DtypeError(f"the sinks of layer {number} have the dtype {given.dtype}; expected float32")
    if not np.isfinite(given).all():
        raise NonFiniteError(f"the sinks of layer {number} hold NaN or infinity; expected finite numbers")
    return given.copy()


def selection(shape: LayerShape, number: int, n: int, queries: Array, weights: Array) -> tuple[Float32, Float32]:
    """What an indexer asks for n tokens. Raises ShapeError, DtypeError or NonFiniteError, which name the layer."""
    for what, array, expected in (
        ("queries", queries, (shape.q_heads, n, shape.head_dim)),
        ("weights", weights, (shape.q_heads, n)),
    ):
        whose = f"the {what} of the indexer of layer {number}"
        if array.shape != expected:
            raise ShapeError(f"{whose} have the shape {array.shape}; expected {expected}")
        if array.dtype != np.float32:
            raise DtypeError(f"{whose} have the dtype {array.dtype}; expected float32")
        if not np.isfinite(array).all():
            raise NonFiniteError(f"{whose} hold NaN or infinity; expected finite numbers")
    return queries, weights


def state_position(given: Any, most: int) -> int:
    """The position of a state. Raises PositionError for one that is not within the first `most` tokens."""
    if not is_whole(given) or not 1 <= given <= most:
        raise PositionError(f"position is {given!r}; expected how many tokens the state is of, 1 to {most}")
    return int(given)


def queries(shape: LayerShape, q: Array) -> int:
    """The number of tokens in q. Raises ShapeError or DtypeError."""
    _array(shape, "q", q, shape.q_heads, shape.head_dim)
    return int(q.shape[1])


def keys_values(shape: LayerShape, k: Array, v: Array) -> int:
    """The number of tokens in k and v. Raises ShapeError or DtypeError."""
    _array(shape, "k", k, shape.kv_heads, shape.head_dim)
    _array(shape, "v", v, shape.kv_heads, shape.value_width)
    if k.shape[1] != v.shape[1]:
        raise ShapeError(f"k holds {k.shape[1]} tokens and v {v.shape[1]}; expected the same number")
    return int(k.shape[1])


def same_tokens(queries_held: int, keys_held: int) -> None:
    """Raises ShapeError unless q holds as many tokens as k and v do."""
    if queries_held != keys_held:
        raise ShapeError(
            f"q holds {queries_held} tokens and k, v {keys_held}; attend expects the same number, use attention for fewer queries"
        )


def start_of(given: int | None, length: int, layer_number: int) -> None:
    """Raises PositionError unless `given` is the position of the layer's next token, or None."""
    if given is not None and (not is_whole(given) or given != length):
        raise PositionError(
            f"start is {given!r}, but layer {layer_number} holds {length} tokens; expected start={length}, "
            "so hand in the tokens that follow, each once"
        )


def together(sessions: Sequence[object], own: Sequence[object]) -> None:
    """Raises InvalidArgument unless one call can take these sessions: at least one, and each once. own: the sessions among them
    that belong to the database, which must be all."""
    if len(own) < len(sessions):
        raise InvalidArgument("a session is another database's; expected sessions that were opened in this one")
    if not len(sessions):
        raise InvalidArgument("no sessions are given; expected at least one")
    first: dict[int, int] = {}
    for i, session in enumerate(sessions):
        if first.setdefault(id(session), i) != i:
            raise InvalidArgument(f"sessions[{i}] is sessions[{first[id(session)]}] again; expected each session once")


def stacked(what: str, array: Any, sessions: int) -> None:
    """Raises ShapeError unless the array holds one `[heads, tokens, head_dim]` for each session."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != 4 or shape[0] != sessions:
        raise ShapeError(f"{what} has the shape {shape}; expected ({sessions}, heads, tokens, head_dim) for {sessions} sessions")


def starts(given: Any, sessions: int) -> None:
    """Raises InvalidArgument unless `given` holds a position for each session, or is None."""
    if given is None:
        return
    if not isinstance(given, Sequence | np.ndarray) or len(given) != sessions:
        raise InvalidArgument(f"starts is {given!r}; expected {sessions} positions, one for each session, or None")
    for i, value in enumerate(given):
        if not is_whole(value) or not -POSITION_MAX <= value <= POSITION_MAX:
            raise InvalidArgument(f"starts[{i}] is {value!r}; expected the number of tokens that the session's layer holds")


def same_spec(spec: ModelSpec, first: ModelSpec) -> None:
    """Raises SpecMismatch unless a session has the same model as the first one of its call."""
    if spec != first:
        raise SpecMismatch(f"it is of {spec}, and sessions[0] of {first}; expected sessions of one model")


@contextmanager
def numbered(session: int) -> Iterator[None]:
    """Make an error about one of several sessions say which session it is."""
    try:
        yield
    except KvdbError as error:
        raise type(error)(f"sessions[{session}]: {error}") from error


def position(what: str, given: Any) -> int:
    """Raises PositionError unless the value is a number of tokens that any context could have."""
    if not is_whole(given) or not 0 <= given <= POSITION_MAX:
        raise PositionError(f"{what} is {given!r}; expected a number of tokens, 0 to {POSITION_MAX}")
    return int(given)


def held(what: str, given: int, last: int, where: str) -> int:
    """Raises PositionError for more than the `last` tokens that are there. where: what has them."""
    if given > last:
        raise PositionError(f"{what} is {given}; expected at most {last}, {where}")
    return given


def buffers(shape: LayerShape, k: Array, v: Array, n: int) -> None:
    """Raises ShapeError, DtypeError or InvalidArgument unless the KV of n tokens can be written into k and v."""
    room = keys_values(shape, k, v)
    if room != n:
        raise ShapeError(f"out has room for {room} tokens; expected {n}, as many as are read")
    for what, array in (("k", k), ("v", v)):
        if not array.flags.writeable or (array.size and array.strides[-1] != array.itemsize):
            raise InvalidArgument(f"{what} of out is read-only, or its last dimension is not contiguous; expected neither")


def base(given: Any) -> int:
    """Raises InvalidArgument unless the value is a position."""
    if not is_whole(given) or not 0 <= given <= POSITION_MAX:
        raise InvalidArgument(f"base is {given!r}; expected the position of the chunk's first token, 0 to {POSITION_MAX}")
    return int(given)


def part(given: PromptPart) -> None:
    """Raises InvalidArgument unless a part's `visible` and `at` are numbers; whether they fit depends on what is stored."""
    for what, value in (("visible", given.visible), ("at", given.at)):
        if value is not None and (not is_whole(value) or not -POSITION_MAX <= value <= POSITION_MAX):
            raise InvalidArgument(f"a part has {what}={value!r}; expected a number of tokens, or None")


def positions(given: Any, n: int, end: int, layer_number: int) -> None:
    """Raises ShapeError, DtypeError, or PositionError unless these are n ascending positions before `end`."""
    if not isinstance(given, np.ndarray) or given.shape != (n,):
        raise ShapeError(f"positions have the shape {np.shape(given)}; expected ({n},), one for each token")
    if given.dtype != np.int64:
        raise DtypeError(f"positions have the dtype {given.dtype}; expected int64")
    if not n:
        return
    if given[0] < 0 or given[-1] >= end or (np.diff(given) <= 0).any():
        raise PositionError(
            f"positions of layer {layer_number} run from {given[0]} to {given[-1]}; expected ascending ones, each once, "
            f"from 0 to {end - 1}, before the tail"
        )


def token_ids(tokens: Any) -> Tokens:
    """int32 `[n]`, a copy. Raises ShapeError, DtypeError or InvalidArgument."""
    given = as_array("tokens", tokens)
    if given.size == 0 and given.ndim == 1:
        return np.zeros(0, np.int32)
    if given.ndim != 1:
        raise ShapeError(f"tokens have the shape {given.shape}; expected one dimension, the ids of one sequence")
    if not np.issubdtype(given.dtype, np.integer):
        raise DtypeError(f"tokens have the dtype {given.dtype}; expected integers, the ids of one sequence")
    if given.min() < 0 or given.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(f"tokens run from {given.min()} to {given.max()}; expected ids from 0 to {np.iinfo(np.int32).max}")
    return given.astype(np.int32)


def as_array(what: str, given: Any) -> Array:
    """A numpy array of a sequence of numbers. Raises ShapeError for lists of different lengths."""
    try:
        return np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise ShapeError(f"{what} are no array ({error}); expected one dimension of integers") from None


def iterable(what: str, given: Iterable[Any], expected: str) -> Iterator[Any]:
    """The iterator of a value. Raises InvalidArgument for a value that has none."""
    try:
        return iter(given)
    except TypeError:
        raise InvalidArgument(f"{what} is a {type(given).__name__}; expected {expected}") from None


def flag(what: str, given: Any) -> bool:
    """Raises InvalidArgument unless the value is true or false."""
    if not isinstance(given, bool | int | np.bool_):
        raise InvalidArgument(f"{what} is {given!r}; expected True or False")
    return bool(given)


def spec(given: Any) -> ModelSpec:
    """Raises SpecError unless the value is a ModelSpec."""
    if not isinstance(given, ModelSpec):
        raise SpecError(f"spec is a {type(given).__name__}; expected a kvdb.ModelSpec")
    return given


def number(what: str, given: Any) -> float:
    """Raises InvalidArgument unless the value is a real number."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise InvalidArgument(f"{what} is {given!r}; expected a number")
    return float(given)


def kind(given: Any) -> str:
    """Raises InvalidArgument unless the value is the name of a kind of index."""
    if not isinstance(given, str) or given not in registry.KINDS:
        raise InvalidArgument(f"no kind of index is named {given!r}; expected one of {', '.join(registry.KINDS)}")
    return given


def name(given: Any) -> str:
    """Raises InvalidArgument unless the value is a printable string of acceptable length."""
    if not isinstance(given, str) or not given or len(given) > NAME_LENGTH_MAX or not given.isprintable():
        raise InvalidArgument(f"a context's name is {given!r}; expected 1 to {NAME_LENGTH_MAX} printable characters")
    return given


def durability(given: Any) -> str | None:
    """Raises InvalidArgument unless the value is one of DURABILITIES, or None for the configuration's."""
    if given is not None and given not in DURABILITIES:
        raise InvalidArgument(f"durability is {given!r}; expected one of {', '.join(map(repr, DURABILITIES))}, or none")
    return None if given is None else str(given)


def format_of(given: Any) -> str | None:
    """Raises InvalidArgument unless the value names a codec, or None for the configuration's."""
    if given is not None and not (isinstance(given, str) and given in codecs.CODECS):
        raise InvalidArgument(f"format is {given!r:.200}; expected one of {codecs.names()}, or none")
    return None if given is None else str(given)


def text(what: str, given: Any) -> str:
    """Raises InvalidArgument unless the value is a string that UTF-8 can hold. what: its name."""
    if isinstance(given, str):
        with suppress(UnicodeEncodeError):
            given.encode()
            return given
    raise InvalidArgument(f"{what} is {given!r:.200}; expected text")


def salt(given: Any) -> str:
    """Raises InvalidArgument unless the value is text of at most NAME_LENGTH_MAX characters."""
    if len(text("salt", given)) > NAME_LENGTH_MAX:
        raise InvalidArgument(f"salt has {len(given)} characters; expected at most {NAME_LENGTH_MAX}, such as a hash of it")
    return str(given)


def limit(given: Any) -> int | None:
    """Raises InvalidArgument unless the value is a number of contexts, at least 1, or None."""
    if given is not None and not (is_whole(given) and 1 <= given < 1 << 63):
        raise InvalidArgument(f"limit is {given!r:.200}; expected a number of contexts from 1, or None for all")
    return None if given is None else int(given)


def expected_tokens(given: Any) -> int | None:
    """Raises InvalidArgument unless the value is a number of tokens, or None."""
    if given is None or (is_whole(given) and 0 <= given <= POSITION_MAX):
        return None if given is None else int(given)
    raise InvalidArgument(f"expected_tokens is {given!r:.200}; expected how many tokens the session will ask for, from 0")


def ttl(given: Any) -> float:
    """Raises InvalidArgument unless the value is a positive number of seconds, or infinite."""
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not given > 0:
        raise InvalidArgument(f"ttl is {given!r:.200}; expected a positive number of seconds, or math.inf for no end")
    return float(given)


def metadata(given: Any) -> Mapping[str, Any]:
    """Raises InvalidArgument unless the value is a dictionary that JSON can hold in METADATA_BYTES_MAX bytes."""
    try:
        text = json.dumps(given, allow_nan=False)
        kept = json.loads(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from None
    if not isinstance(given, Mapping) or kept != given:
        raise InvalidArgument(f"metadata is {given!r:.200}; expected a dictionary with text as keys")
    if len(text) > METADATA_BYTES_MAX:
        raise InvalidArgument(f"metadata takes {len(text):,} bytes as JSON; expected at most {METADATA_BYTES_MAX:,}")
    return dict(kept)


def retention(given: Retention) -> Retention:
    """Raises InvalidArgument for what a new context cannot have; see the checks of its fields."""
    seconds = None if given.ttl is None else ttl(given.ttl)
    noted = metadata({} if given.metadata is None else given.metadata)
    return Retention(durability(given.durability), seconds, noted, flag("pinned", given.pinned), format_of(given.format))


def is_whole(given: Any) -> bool:
    """Whether the value is an integer, and not a bool."""
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _array(of: LayerShape, what: str, array: npt.NDArray[Any], heads: int, dim: int) -> None:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != 3 or shape[0] != heads or shape[2] != dim:
        raise ShapeError(f"{what} has the shape {shape}; expected ({heads}, tokens, {dim}) for {of.name}")
    if array.dtype != of.numpy_dtype:
        raise DtypeError(f"{what} has the dtype {array.dtype}; expected {of.dtype}, which {of.name} was declared with")
