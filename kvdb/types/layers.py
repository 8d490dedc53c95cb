"""What the layers of a model keep, where they differ from one another."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvdb.errors import SpecError
from kvdb.types.arrays import DTYPES
from kvdb.types.rope import Rope, is_number, is_whole

HEAD_DIM_MAX = 640
HEADS_MAX = 4096
WINDOW_MAX = 1 << 40
STATE_ARRAYS_MAX = 64
STATE_DTYPES = {**DTYPES, "int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "bool": np.dtype(np.bool_)}
VALUES = ("own", "keys")
"""Where the values of a layer are: beside its keys, or the first numbers of them."""


@dataclass(frozen=True)
class Indexer:
    """Keys by which a model selects tokens itself (DeepSeek sparse attention, arXiv 2512.02556).

    heads: of its queries, over one key a token of `dim` numbers. top: how many tokens a query selects.
    """

    heads: int
    dim: int
    top: int

    def __post_init__(self) -> None:
        for what, most in {"heads": HEADS_MAX, "dim": HEAD_DIM_MAX, "top": WINDOW_MAX}.items():
            _check("Indexer", what, getattr(self, what), most)
        _check_dim("Indexer.dim", self.dim)


@dataclass(frozen=True)
class Attention:
    """A layer that keeps keys and values of each token.

    q_heads, kv_heads: query head h reads KV head h // (q_heads // kv_heads). key_dim, value_dim: numbers of a key and of a value,
    multiples of 8 up to 640; value_dim None for as many as a key has. rope: how keys were rotated, None for no rotation. scale:
    the factor of q.k in the softmax, None for 1/sqrt(key_dim). window: a query sees the last so many tokens, its own included,
    None for all. sinks: whether each query head has one more logit in the softmax, without a value (gpt-oss). values: "own", or
    "keys" where a value is the first `value_dim` numbers of its key (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).
    indexer: the keys of the model's own selection, None for none.

    Raises SpecError for a layer that cannot exist.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int | None = None
    rope: Rope | None = None
    scale: float | None = None
    window: int | None = None
    sinks: bool = False
    values: str = "own"
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        for what, most in {"q_heads": HEADS_MAX, "kv_heads": HEADS_MAX, "key_dim": HEAD_DIM_MAX}.items():
            _check("Attention", what, getattr(self, what), most)
        if self.q_heads % self.kv_heads:
            raise SpecError(f"Attention has q_heads={self.q_heads} and kv_heads={self.kv_heads}; expected a multiple of kv_heads")
        _check_dim("Attention.key_dim", self.key_dim)
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.key_dim)
        _check("Attention", "value_dim", self.value_dim, self.key_dim if self.values == "keys" else HEAD_DIM_MAX)
        _check_dim("Attention.value_dim", self.width_of_values)
        if self.window is not None:
            _check("Attention", "window", self.window, WINDOW_MAX)
        if self.values not in VALUES:
            raise SpecError(f"Attention.values is {self.values!r:.100}; expected one of {', '.join(VALUES)}")
        if not isinstance(self.sinks, bool):
            raise SpecError(f"Attention.sinks is {self.sinks!r:.100}; expected True or False")
        check_rope("Attention", self.rope, self.key_dim)
        check_scale("Attention", self.scale)
        if not isinstance(self.indexer, Indexer | None):
            raise SpecError(f"Attention.indexer is {self.indexer!r:.100}; expected a kvdb.Indexer, or None")

    @property
    def width_of_values(self) -> int:
        """The numbers of a value."""
        assert self.value_dim is not None
        return self.value_dim

    @property
    def plain(self) -> bool:
        """Whether it is what the short form of a spec can say."""
        return self == Attention(self.q_heads, self.kv_heads, self.key_dim, rope=self.rope, scale=self.scale)

    @property
    def text(self) -> str:
        """What it keeps, for people."""
        values = "values in them" if self.values == "keys" else f"values of {self.value_dim}"
        sees = "" if self.window is None else f", windows of {self.window:,}"
        selects = "" if self.indexer is None else f", indexer keys of {self.indexer.dim}"
        heads = f"{self.q_heads} query heads on {self.kv_heads} KV heads"
        return f"of {heads}, keys of {self.key_dim}, {values}{sees}{', sinks' if self.sinks else ''}{selects}"


@dataclass(frozen=True)
class State:
    """A layer that keeps one snapshot, whatever the length (Mamba, DeltaNet).

    arrays: shape and dtype of each of its arrays, by name. A dimension of None may differ between snapshots. A dtype is one of
    "float32", "float16", "bfloat16", "int32", "int64" and "bool". Kept as sorted tuples. Raises SpecError for arrays that cannot
    be.
    """

    arrays: Any

    def __post_init__(self) -> None:
        try:
            given = (
                self.arrays.items()
                if isinstance(self.arrays, Mapping)
                else ((name, (shape, dt)) for name, shape, dt in self.arrays)
            )
            arrays = tuple(sorted((str(name), tuple(shape), str(dtype)) for name, (shape, dtype) in given))
        except (TypeError, ValueError):
            raise SpecError(f"State.arrays is {self.arrays!r:.100}; expected (shape, dtype) by the arrays' names") from None
        if not 1 <= len(arrays) <= STATE_ARRAYS_MAX:
            raise SpecError(f"State has {len(arrays)} arrays; expected 1 to {STATE_ARRAYS_MAX}")
        for name, shape, dtype in arrays:
            if dtype not in STATE_DTYPES:
                raise SpecError(
                    f"State array {name!r:.100} has the dtype {dtype!r:.100}; expected one of {', '.join(STATE_DTYPES)}"
                )
            if not all(n is None or (is_whole(n) and n >= 0) for n in shape):
                raise SpecError(
                    f"State array {name!r:.100} has the shape {shape!r:.100}; expected whole numbers, or None for any"
                )
        object.__setattr__(self, "arrays", arrays)

    @cached_property
    def by_name(self) -> dict[str, tuple[tuple[int | None, ...], np.dtype[Any]]]:
        """The shape and dtype of each array."""
        return {name: (shape, STATE_DTYPES[dtype]) for name, shape, dtype in self.arrays}

    @property
    def text(self) -> str:
        """What it keeps, for people."""
        return f"of states ({', '.join(self.by_name)})"


@dataclass(frozen=True)
class Shares:
    """A layer that reads what an earlier layer keeps (Gemma 4), and keeps nothing itself. layer: the number of that layer."""

    layer: int

    def __post_init__(self) -> None:
        if not is_whole(self.layer) or self.layer < 0:
            raise SpecError(f"Shares.layer is {self.layer!r:.100}; expected the number of an earlier layer")

    @property
    def text(self) -> str:
        """What it keeps, for people."""
        return f"that read layer {self.layer}"


Description = Attention | State | Shares
KINDS: Mapping[str, type[Description]] = {"attention": Attention, "state": State, "shares": Shares}


class LayerGroup(NamedTuple):
    """Layers with equal descriptions, by their numbers."""

    description: Description
    layers: tuple[int, ...]


def groups_of(layers: tuple[Description, ...]) -> tuple[LayerGroup, ...]:
    """Layers with equal descriptions, in the order of the first of each."""
    groups: dict[Description, list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(layer, []).append(number)
    return tuple(LayerGroup(description, tuple(numbers)) for description, numbers in groups.items())


def to_values(layer: Description) -> dict[str, Any]:
    """A description as plain values, for JSON and the wire: its kind, and the fields that are not as they are by default."""
    kind = next(name for name, cls in KINDS.items() if isinstance(layer, cls))
    given = {field.name: getattr(layer, field.name) for field in fields(layer) if getattr(layer, field.name) != field.default}
    values = {name: asdict(value) if isinstance(value, Rope | Indexer) else value for name, value in given.items()}
    if isinstance(layer, Attention) and layer.value_dim == layer.key_dim:
        del values["value_dim"]
    return {"kind": kind, **values}


def from_values(number: int, values: Mapping[str, Any]) -> Description:
    """The description of the layer of that number that `to_values` wrote. Raises SpecError for one that this version does not
    know."""
    try:
        given = dict(values)
        kind = KINDS.get(str(given.pop("kind", None)))
        if kind is None:
            raise SpecError(f"layer {number} is {values!r:.200}, of a kind that is not known here; expected {', '.join(KINDS)}")
        if given.get("rope") is not None:
            given["rope"] = Rope(**given["rope"])
        if given.get("indexer") is not None:
            given["indexer"] = Indexer(**given["indexer"])
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise SpecError(f"layer {number} is {values!r:.200}, which are not the fields of a layer ({error})") from None


def check_layers(layers: tuple[object, ...]) -> tuple[Description, ...]:
    """The layers of a spec. Raises SpecError, which names the layer, for what is none, and for one that shares what is not kept
    before it."""
    known: list[Description] = []
    for number, layer in enumerate(layers):
        if not isinstance(layer, Attention | State | Shares):
            raise SpecError(f"layer {number} is {layer!r:.100}; expected a kvdb.Attention, kvdb.State or kvdb.Shares")
        if isinstance(layer, Shares) and (layer.layer >= number or not isinstance(known[layer.layer], Attention)):
            raise SpecError(f"layer {number} shares layer {layer.layer}; expected an earlier layer with kvdb.Attention")
        known.append(layer)
    if not any(isinstance(layer, Attention) for layer in known):
        raise SpecError("no layer is a kvdb.Attention; kvdb finds contexts by what attention keeps of each token")
    return tuple(known)


def check_rope(owner: str, rope: object, key_dim: int) -> None:
    """Raises SpecError for what is no RoPE of keys of that size."""
    if not isinstance(rope, Rope | None):
        raise SpecError(f"{owner}.rope is {rope!r:.100}; expected a kvdb.Rope, or None")
    if rope and (rope.rotary_dims or 0) > key_dim:
        raise SpecError(f"Rope.rotary_dims is {rope.rotary_dims}; expected at most the size of a key, which is {key_dim}")


def check_scale(owner: str, scale: object) -> None:
    """Raises SpecError for what is no factor of a softmax."""
    if scale is not None and (not is_number(scale) or not 0 < scale < inf):
        raise SpecError(f"{owner}.scale is {scale!r}; expected a positive number, or None for 1/sqrt of a key's size")


def _check(owner: str, what: str, value: object, most: int) -> None:
    if not is_whole(value) or not 1 <= value <= most:
        raise SpecError(f"{owner}.{what} is {value!r}; expected an integer of at least 1, up to {most}")


def _check_dim(what: str, value: int) -> None:
    if value % 8:
        raise SpecError(f"{what} is {value}; expected a multiple of 8 from 8 to {HEAD_DIM_MAX}")
