"""How a model rotates keys and queries by their positions."""

import json
from dataclasses import dataclass
from math import inf
from typing import Any, TypeGuard

from kvdb.errors import SpecError

ROPE_LAYOUTS = ("half", "interleaved")
SCALING_LENGTH_MAX = 1 << 16  # of a RoPE's scaling parameters as JSON


@dataclass(frozen=True)
class Rope:
    """How the model rotates keys and queries (RoFormer, arXiv 2104.09864).

    theta: base of the frequencies. rotary_dims: how many leading dimensions of a head are rotated, None for all.
    layout: "half" pairs dimension i with i + rotary_dims / 2 (Llama, Qwen), "interleaved" pairs 2i with 2i + 1 (GPT-J).
    scaling: the model's own scaling parameters by name, such as {"rope_type": "yarn", "factor": 4.0}; kept as sorted pairs.
    """

    theta: float = 10000.0
    rotary_dims: int | None = None
    layout: str = "half"
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.theta) or not 0 < self.theta < inf:
            raise SpecError(f"Rope.theta is {self.theta!r}; expected a positive base such as 10000.0")
        if str(self.layout) not in ROPE_LAYOUTS:
            raise SpecError(f"Rope.layout is {self.layout!r}; expected one of {', '.join(ROPE_LAYOUTS)}")
        dims = self.rotary_dims
        if dims is not None and (not is_whole(dims) or dims < 2 or dims % 2):
            raise SpecError(f"Rope.rotary_dims is {dims!r}; expected an even number from 2 up to head_dim, or None for all")
        object.__setattr__(self, "scaling", _scaling(self.scaling))


def _scaling(given: Any) -> tuple[tuple[str, Any], ...]:
    """The parameters as sorted pairs. Raises SpecError for what is no JSON object of numbers, texts and lists of these."""
    try:
        values = dict(given)
        length = len(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"Rope.scaling is {given!r:.100}; expected the model's parameters by name ({error!s:.100})") from None
    if length > SCALING_LENGTH_MAX:
        raise SpecError(f"Rope.scaling has {length} characters as JSON; expected at most {SCALING_LENGTH_MAX}")
    return tuple(sorted((str(name), _frozen(value)) for name, value in values.items()))


def _frozen(value: Any) -> Any:
    """A parameter that can be hashed. Raises SpecError for an object inside."""
    if isinstance(value, dict):
        raise SpecError(f"Rope.scaling has the object {value!r:.100}; expected numbers, texts and lists of these")
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def is_whole(given: object) -> TypeGuard[int]:
    """Whether the value is an integer, and not a bool."""
    return isinstance(given, int) and not isinstance(given, bool)


def is_number(given: object) -> TypeGuard[float]:
    """Whether the value is a number, and not a bool."""
    return isinstance(given, int | float) and not isinstance(given, bool)
