"""Checks of what a caller hands in; each raises the error that says what was given and what was expected."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes.registry as registry
from indexes.retrieval import Retrieval
from kvdb.errors import DtypeError, InvalidArgument, KvdbError, LayerError, PositionError, ShapeError, SpecMismatch
from kvdb.types import Array, ModelSpec, Part, Tokens
from query_optimizer.wanted import NO_HINTS, Hints, Wanted

NAME_LENGTH_MAX = 1024
POSITION_MAX = 1 << 53
"""The last one that float64 tells from the next, in which the angles of a move are computed."""


def layer(spec: ModelSpec, number: Any) -> None:
    """Raises LayerError."""
    if not isinstance(number, int | np.integer) or not 0 <= number < spec.layers:
        raise LayerError(f"layer is {number!r}; expected 0 to {spec.layers - 1}, the layers of {spec.name}")


def queries(spec: ModelSpec, q: Array) -> int:
    """How many tokens ask. Raises ShapeError or DtypeError."""
    _array(spec, "q", q, spec.q_heads)
    return int(q.shape[1])


def keys_values(spec: ModelSpec, k: Array, v: Array) -> int:
    """How many tokens are given. Raises ShapeError or DtypeError."""
    _array(spec, "k", k, spec.kv_heads)
    _array(spec, "v", v, spec.kv_heads)
    if k.shape[1] != v.shape[1]:
        raise ShapeError(f"k holds {k.shape[1]} tokens and v {v.shape[1]}; expected the same number")
    return int(k.shape[1])


def same_tokens(asking: int, given: int) -> None:
    """Raises ShapeError."""
    if asking != given:
        raise ShapeError(
            f"q holds {asking} tokens and k, v {given}; attend expects the same number, use attention for fewer queries"
        )


def start(given: int | None, length: int, layer_number: int) -> None:
    """Raises PositionError unless the next token's position is `given`, or none was given."""
    if given is not None and given != length:
        raise PositionError(
            f"start is {given}, but layer {layer_number} holds {length} tokens; expected start={length}, "
            "so hand in the tokens that follow, each once"
        )


def together(sessions: Sequence[object], own: Sequence[object]) -> None:
    """Raises InvalidArgument unless these are sessions for one call: some, each once, all of the database's own."""
    if len(own) < len(sessions):
        raise InvalidArgument("a session is another database's; expected sessions that were opened in this one")
    if not len(sessions):
        raise InvalidArgument("no sessions are given; expected at least one")
    first: dict[int, int] = {}
    for i, session in enumerate(sessions):
        if first.setdefault(id(session), i) != i:
            raise InvalidArgument(f"sessions[{i}] is sessions[{first[id(session)]}] again; expected each session once")


def stacked(what: str, array: Any, sessions: int) -> None:
    """Raises ShapeError unless it holds one array for each session."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != 4 or shape[0] != sessions:
        raise ShapeError(f"{what} has the shape {shape}; expected ({sessions}, heads, tokens, head_dim) for {sessions} sessions")


def starts(given: Sequence[int] | None, sessions: int) -> None:
    """Raises InvalidArgument unless there is a position for each session, or none was given."""
    if given is None:
        return
    if len(given) != sessions:
        raise InvalidArgument(f"starts holds {len(given)} positions; expected {sessions}, one a session, or None")
    for i, value in enumerate(given):
        if not _whole(value) or not -POSITION_MAX <= value <= POSITION_MAX:
            raise InvalidArgument(f"starts[{i}] is {value!r}; expected the number of tokens that the session's layer holds")


def same_spec(spec: ModelSpec, first: ModelSpec) -> None:
    """Raises SpecMismatch unless a session is of the same model as the first of its call."""
    if spec != first:
        raise SpecMismatch(f"it is of {spec}, and sessions[0] of {first}; expected sessions of one model")


@contextmanager
def numbered(session: int) -> Iterator[None]:
    """Errors of one session of several say of which."""
    try:
        yield
    except KvdbError as error:
        raise type(error)(f"sessions[{session}]: {error}") from error


def base(given: Any) -> int:
    """Raises InvalidArgument unless it is a position."""
    if not _whole(given) or not 0 <= given <= POSITION_MAX:
        raise InvalidArgument(f"base is {given!r}; expected the position of the chunk's first token, 0 to {POSITION_MAX}")
    return int(given)


def part(given: Part) -> None:
    """Raises InvalidArgument unless `visible` and `at` of a part are numbers; which they can be depends on what is stored."""
    for what, value in (("visible", given.visible), ("at", given.at)):
        if value is not None and (not _whole(value) or not -POSITION_MAX <= value <= POSITION_MAX):
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
    given = np.asarray(tokens)
    if given.size == 0 and given.ndim == 1:
        return np.zeros(0, np.int32)
    if given.ndim != 1:
        raise ShapeError(f"tokens have the shape {given.shape}; expected one dimension, the ids of one sequence")
    if not np.issubdtype(given.dtype, np.integer):
        raise DtypeError(f"tokens have the dtype {given.dtype}; expected integers, the ids of one sequence")
    if given.min() < 0 or given.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(f"tokens run from {given.min()} to {given.max()}; expected ids from 0 to {np.iinfo(np.int32).max}")
    return given.astype(np.int32)


def wanted(retrieval: Any, missed_mass_max: Any, estimate_tail: Any, hints: Any = None) -> Wanted:
    """What a query asks for beside its vectors. Raises InvalidArgument."""
    if retrieval is not None and not isinstance(retrieval, Retrieval):
        raise InvalidArgument(
            f"retrieval is {retrieval!r}; expected kvdb.Exact(), kvdb.Dipr(alpha), kvdb.TopK(k) or kvdb.TopP(p), "
            "or None to let the optimizer decide"
        )
    if missed_mass_max is not None and (isinstance(missed_mass_max, bool) or not isinstance(missed_mass_max, Real)):
        raise InvalidArgument(f"max_missed_mass is {missed_mass_max!r}; expected a share of the softmax mass in (0, 1], or None")
    if hints is not None and not isinstance(hints, Hints):
        raise InvalidArgument(f"hints are {hints!r}; expected kvdb.Hints(index=, rules_off=, memory_budget=), or None")
    try:
        share = None if missed_mass_max is None else float(missed_mass_max)
        return Wanted(retrieval, share, bool(estimate_tail), NO_HINTS if hints is None else hints)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def number(what: str, given: Any) -> float:
    """Raises InvalidArgument unless it is a real number."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise InvalidArgument(f"{what} is {given!r}; expected a number")
    return float(given)


def kind(given: Any) -> str:
    """Raises InvalidArgument unless it is a kind of index."""
    if not isinstance(given, str) or given not in registry.KINDS:
        raise InvalidArgument(f"no kind of index is named {given!r}; expected one of {', '.join(registry.KINDS)}")
    return given


def name(given: Any) -> str:
    """Raises InvalidArgument unless it is a printable string of some length."""
    if not isinstance(given, str) or not given or len(given) > NAME_LENGTH_MAX or not given.isprintable():
        raise InvalidArgument(f"a context's name is {given!r}; expected 1 to {NAME_LENGTH_MAX} printable characters")
    return given


def _whole(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _array(spec: ModelSpec, what: str, array: npt.NDArray[Any], heads: int) -> None:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != 3 or shape[0] != heads or shape[2] != spec.head_dim:
        raise ShapeError(f"{what} has the shape {shape}; expected ({heads}, tokens, {spec.head_dim}) for {spec.name}")
    if array.dtype != spec.numpy_dtype:
        raise DtypeError(f"{what} has the dtype {array.dtype}; expected {spec.dtype}, which {spec.name} was declared with")
