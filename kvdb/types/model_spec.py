"""What a model's cache is: the shape of its attention, its dtype, and how it rotates."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from kvdb.errors import SpecError
from kvdb.types.arrays import DTYPES

ROPE_LAYOUTS = ("half", "interleaved")
HEAD_DIM_MAX = 256
LAYERS_MAX = 1024
HEADS_MAX = 4096
HEADS_TOTAL_MAX = 1 << 18  # query heads of all layers
TEXT_LENGTH_MAX = 1024  # of a model's name or fingerprint
SCALING_LENGTH_MAX = 1 << 16  # of a RoPE's scaling parameters as JSON
"""These limits of a spec are several times what any model has; they keep an empty session small."""


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
        if not _is_number(self.theta) or not 0 < self.theta < inf:
            raise SpecError(f"Rope.theta is {self.theta!r}; expected a positive base such as 10000.0")
        if str(self.layout) not in ROPE_LAYOUTS:
            raise SpecError(f"Rope.layout is {self.layout!r}; expected one of {', '.join(ROPE_LAYOUTS)}")
        dims = self.rotary_dims
        if dims is not None and (not _is_whole(dims) or dims < 2 or dims % 2):
            raise SpecError(f"Rope.rotary_dims is {dims!r}; expected an even number from 2 up to head_dim, or None for all")
        object.__setattr__(self, "scaling", _scaling(self.scaling))


@dataclass(frozen=True)
class ModelSpec:
    """What fixes a cache's meaning. KV of one spec never answers a query of another.

    name: the model's name, for people. layers, q_heads, kv_heads, head_dim: the attention's shape; query head h reads KV head h
    // (q_heads // kv_heads). head_dim: a multiple of 8 from 8 to 256. dtype: "float32", "float16" or "bfloat16", of keys, values,
    queries and outputs. rope: how keys were rotated, None for a model without RoPE. fingerprint: distinguishes weights of the
    same name. scale: the factor by which the softmax multiplies q.k, None for 1/sqrt(head_dim).

    Raises SpecError for a spec that cannot exist.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    rope: Rope | None = None
    fingerprint: str = ""
    scale: float | None = None

    def __post_init__(self) -> None:
        limits = {"layers": LAYERS_MAX, "q_heads": HEADS_MAX, "kv_heads": HEADS_MAX, "head_dim": HEAD_DIM_MAX}
        for what, most in limits.items():
            value = getattr(self, what)
            if not _is_whole(value) or not 1 <= value <= most:
                raise SpecError(f"ModelSpec.{what} is {value!r}; expected an integer of at least 1, up to {most}")
        for what in ("name", "fingerprint"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > TEXT_LENGTH_MAX:
                raise SpecError(f"ModelSpec.{what} is {text!r:.100}; expected a string of at most {TEXT_LENGTH_MAX} characters")
        if self.layers * self.q_heads > HEADS_TOTAL_MAX:
            raise SpecError(f"ModelSpec has {self.layers} layers of {self.q_heads} heads; expected {HEADS_TOTAL_MAX} in all")
        if self.q_heads % self.kv_heads:
            raise SpecError(f"ModelSpec has q_heads={self.q_heads} and kv_heads={self.kv_heads}; expected a multiple of kv_heads")
        if self.head_dim % 8:
            raise SpecError(f"ModelSpec.head_dim is {self.head_dim}; expected a multiple of 8 from 8 to {HEAD_DIM_MAX}")
        if str(self.dtype) not in DTYPES:
            raise SpecError(f"ModelSpec.dtype is {self.dtype!r:.100}; expected one of {', '.join(DTYPES)}")
        rope: object = self.rope
        if not isinstance(rope, Rope | None):
            raise SpecError(f"ModelSpec.rope is {rope!r:.100}; expected a kvdb.Rope, or None")
        if self.rope and (self.rope.rotary_dims or 0) > self.head_dim:
            raise SpecError(f"Rope.rotary_dims is {self.rope.rotary_dims}; expected at most head_dim, which is {self.head_dim}")
        if self.scale is not None and (not _is_number(self.scale) or not 0 < self.scale < inf):
            raise SpecError(f"ModelSpec.scale is {self.scale!r}; expected a positive number, or None for 1/sqrt(head_dim)")

    @cached_property
    def softmax_scale(self) -> float:
        """What the softmax multiplies q.k with."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes that one token's keys and values take in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.numpy_dtype.itemsize

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every field, in hex: equal exactly when caches may be shared."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the wire; `from_dict` takes them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelSpec":
        """The spec that `to_dict` wrote. Raises SpecError for unknown or missing fields."""
        try:
            given = {**values}
            rope = given.pop("rope", None)
            return cls(rope=None if rope is None else Rope(**rope), **given)
        except TypeError as error:
            raise SpecError(f"{values!r:.200} are not a ModelSpec's fields ({error})") from None

    def __str__(self) -> str:
        heads = f"{self.q_heads} query heads on {self.kv_heads} KV heads"
        return f"{self.name} ({self.layers} layers, {heads}, head_dim {self.head_dim}, {self.dtype}, {self.digest[:8]})"


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


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
