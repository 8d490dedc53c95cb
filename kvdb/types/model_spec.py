"""What a model's cache is: the shape of its attention, its dtype, and how it rotates."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvdb.errors import SpecError
from kvdb.types.arrays import DTYPES
from kvdb.types.kept import Kept, LayerShape, kept_by
from kvdb.types.layers import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    Attention,
    Description,
    LayerGroup,
    Shares,
    State,
    check_layers,
    check_rope,
    check_scale,
    from_values,
    groups_of,
    to_values,
)
from kvdb.types.rope import Rope, is_whole

LAYERS_MAX = 1024
HEADS_TOTAL_MAX = 1 << 18  # query heads of all layers
TEXT_LENGTH_MAX = 1024  # of a model's name or fingerprint
"""These limits of a spec are several times what any model has; they keep an empty session small."""
SHORT = ("q_heads", "kv_heads", "head_dim", "rope", "scale")
"""What the short form says of all layers, and the long form of each."""


@dataclass(frozen=True, init=False)
class ModelSpec:
    """What fixes a cache's meaning. KV of one spec never answers a query of another.

    The short form is for a model whose layers all keep keys and values of one shape. name: the model's name, for people. layers:
    how many. q_heads, kv_heads, head_dim: the attention's shape; query head h reads KV head h // (q_heads // kv_heads). head_dim:
    a multiple of 8 from 8 to 640. dtype: "float32", "float16" or "bfloat16", of keys, values, queries and outputs. rope: how keys
    were rotated, None for a model without RoPE. fingerprint: distinguishes weights of the same name. scale: the factor by which
    the softmax multiplies q.k, None for 1/sqrt(head_dim).

    In the long form `layers` is a description of each layer: `Attention`, `State` or `Shares`. q_heads, kv_heads, head_dim, rope
    and scale are left out then. One whose layers are what the short form can say is the short form.

    descriptions: of each layer in the long form, empty in the short one; not to be given.

    Raises SpecError for a spec that cannot exist.
    """

    name: str
    layers: int
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    rope: Rope | None = None
    fingerprint: str = ""
    scale: float | None = None
    descriptions: tuple[Description, ...] = field(default=(), init=False)

    def __init__(  # noqa: PLR0913, PLR0917  # the fields of the short form
        self,
        name: str,
        layers: int | Sequence[Description],
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: str = "bfloat16",
        rope: Rope | None = None,
        fingerprint: str = "",
        scale: float | None = None,
    ) -> None:
        texts: dict[str, object] = {"name": name, "fingerprint": fingerprint}
        for what, text in texts.items():
            if not isinstance(text, str) or len(text) > TEXT_LENGTH_MAX:
                raise SpecError(f"ModelSpec.{what} is {text!r:.100}; expected a string of at most {TEXT_LENGTH_MAX} characters")
        short: dict[str, Any] = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "rope": rope, "scale": scale}
        descriptions: tuple[Description, ...] = ()
        if isinstance(layers, list | tuple):
            descriptions = _described(layers, short)
            layers, one = len(descriptions), descriptions[0]
            if isinstance(one, Attention) and one.plain and set(descriptions) == {one}:
                descriptions = ()
                short = {"q_heads": one.q_heads, "kv_heads": one.kv_heads, "head_dim": one.key_dim}
                short |= {"rope": one.rope, "scale": one.scale}
        if descriptions:
            short = {"q_heads": 0, "kv_heads": 0, "head_dim": 0, "rope": None, "scale": None}
        else:
            _check_short(layers, **short)
        if str(dtype) not in DTYPES:
            raise SpecError(f"ModelSpec.dtype is {dtype!r:.100}; expected one of {', '.join(DTYPES)}")
        self.__dict__.update(short, name=name, layers=layers, dtype=dtype, fingerprint=fingerprint, descriptions=descriptions)
        heads = sum(layer.q_heads for layer in self.all_layers if isinstance(layer, Attention))
        if heads > HEADS_TOTAL_MAX:
            raise SpecError(f"ModelSpec has {heads} query heads; expected at most {HEADS_TOTAL_MAX} in all")

    @property
    def uniform(self) -> bool:
        """Whether all layers keep keys and values of one shape, which every query sees."""
        return not self.descriptions

    @cached_property
    def all_layers(self) -> tuple[Description, ...]:
        """The description of each layer, also in the short form."""
        one = (
            None if self.descriptions else Attention(self.q_heads, self.kv_heads, self.head_dim, rope=self.rope, scale=self.scale)
        )
        return self.descriptions if one is None else self.layers * (one,)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers with equal descriptions."""
        return groups_of(self.all_layers)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """What is kept of every token: one entry for each block table of a segment or a session, in their order."""
        return kept_by(self.name, self.dtype, self.all_layers)

    @cached_property
    def places(self) -> tuple[int | None, ...]:
        """For each layer, where the keys and values that it reads stand in `kept`; None for a layer with a state."""
        own = {one.layer: place for place, one in enumerate(self.kept) if one.what == "kv"}
        return tuple(
            own.get(layer.layer if isinstance(layer, Shares) else number) for number, layer in enumerate(self.all_layers)
        )

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The numbers of the layers that keep keys and values."""
        return tuple(kept.layer for kept in self.kept if kept.what == "kv")

    @cached_property
    def has_states(self) -> bool:
        """Whether any layer keeps a state, of which a prefix needs one of exactly its length."""
        return any(isinstance(layer, State) for layer in self.descriptions)

    @cached_property
    def indexer_places(self) -> dict[int, int]:
        """Where the keys of indexers stand in `kept`, by the numbers of their layers."""
        return {one.layer: place for place, one in enumerate(self.kept) if one.what == "indexer"}

    def shape(self, place: int) -> LayerShape:
        """The shape of one entry of `kept`."""
        return self.kept[place].shape

    @cached_property
    def softmax_scale(self) -> float:
        """What the softmax multiplies q.k with, in the short form."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes that one token takes in one layer: in the one that keeps most, where they differ."""
        return max(one.shape.token_nbytes for one in self.kept)

    @cached_property
    def tokens_nbytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(one.shape.token_nbytes for one in self.kept)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every field, in hex: equal exactly when caches may be shared."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the wire; `from_dict` takes them back."""
        values = {what: getattr(self, what) for what in ("name", "layers", "dtype", "fingerprint")}
        if self.descriptions:
            return values | {"layers": [to_values(layer) for layer in self.descriptions]}
        short = {what: getattr(self, what) for what in SHORT}
        return values | short | {"rope": None if self.rope is None else asdict(self.rope)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelSpec":
        """The spec that `to_dict` wrote. Raises SpecError for unknown or missing fields."""
        try:
            given = {**values}
            rope = given.pop("rope", None)
            if isinstance(given.get("layers"), list):
                given["layers"] = [from_values(number, layer) for number, layer in enumerate(given["layers"])]
            return cls(rope=None if rope is None else Rope(**rope), **given)
        except TypeError as error:
            raise SpecError(f"{values!r:.200} are not a ModelSpec's fields ({error})") from None

    def __str__(self) -> str:
        return f"{self.name} ({self.layers} layers, {self.shapes}, {self.dtype}, {self.digest[:8]})"

    @property
    def shapes(self) -> str:
        """What its layers keep, for people."""
        if self.uniform:
            return f"{self.q_heads} query heads on {self.kv_heads} KV heads, head_dim {self.head_dim}"
        return " + ".join(f"{len(group.layers)} {group.description.text}" for group in self.groups)


def _described(layers: Sequence[object], short: Mapping[str, Any]) -> tuple[Description, ...]:
    """The layers of the long form. Raises SpecError."""
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise SpecError(f"ModelSpec.layers describes {len(layers)} layers; expected 1 to {LAYERS_MAX}")
    given = [field for field, value in short.items() if value is not None]
    if given:
        raise SpecError(f"ModelSpec has {', '.join(given)} beside descriptions of its layers; say it of each layer there")
    return check_layers(tuple(layers))


def _check_short(layers: object, q_heads: object, kv_heads: object, head_dim: object, rope: object, scale: object) -> None:
    """Raises SpecError for a short form that cannot exist."""
    limits = {"layers": LAYERS_MAX, "q_heads": HEADS_MAX, "kv_heads": HEADS_MAX, "head_dim": HEAD_DIM_MAX}
    values = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for what, most in limits.items():
        value = values[what]
        if not is_whole(value) or not 1 <= value <= most:
            raise SpecError(f"ModelSpec.{what} is {value!r}; expected an integer of at least 1, up to {most}")
    assert isinstance(q_heads, int)
    assert isinstance(kv_heads, int)
    assert isinstance(head_dim, int)
    if q_heads % kv_heads:
        raise SpecError(f"ModelSpec has q_heads={q_heads} and kv_heads={kv_heads}; expected a multiple of kv_heads")
    if head_dim % 8:
        raise SpecError(f"ModelSpec.head_dim is {head_dim}; expected a multiple of 8 from 8 to {HEAD_DIM_MAX}")
    check_rope("ModelSpec", rope, head_dim)
    check_scale("ModelSpec", scale)
