"""The kinds of index by name."""

from collections.abc import Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from indexes.base import BuildCost, Float32, Index
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.flat import Flat
from indexes.hnsw import Hnsw


class UnknownKind(ValueError):
    """An index kind was named that does not exist."""


class Kind(Protocol):
    """What the class of a kind can do before there is an index."""

    @property
    def walks(self) -> bool: ...

    def build(self, blocks: Blocks, samples: Float32 | None = None) -> Index: ...

    def load(self, path: Path, blocks: Blocks) -> Index: ...


class Priced(Protocol):
    """A kind that says beforehand what an index will take; others are built only where somebody asks for them."""

    def build_cost(self, tokens: int, kv_heads: int, head_dim: int) -> BuildCost: ...


class Stepped(Protocol):
    """A kind whose builds take long, so that they can be left off, or for a while, between their steps."""

    def build_steps(self, blocks: Blocks, samples: Float32 | None = None) -> Generator[float, None, Index]: ...


KINDS: Mapping[str, Kind] = {index.kind: index for index in (Flat, Bounds, Means, Clusters, Hnsw)}
"""By name, the cheapest to build first."""


def kind(name: str) -> Kind:
    """The class of that name. Raises UnknownKind."""
    if name not in KINDS:
        raise UnknownKind(f"no kind of index is named {name!r}; expected one of {', '.join(KINDS)}")
    return KINDS[name]


def missing_library(name: str) -> str | None:
    """The library that building an index of that kind needs and that is not installed; None where nothing is missing.

    A kind says in `library` what it needs, if anything. Raises UnknownKind.
    """
    library: str | None = getattr(kind(name), "library", None)
    return library if library is not None and find_spec(library) is None else None


def build(name: str, blocks: Blocks, samples: Float32 | None = None) -> Index:
    """An index of that kind over `blocks`. samples: queries `[q_heads, m, head_dim]` for the kinds that learn from some.

    Raises UnknownKind, and ModuleNotFoundError for a kind whose library is not installed.
    """
    return kind(name).build(blocks, samples)


def build_steps(name: str, blocks: Blocks, samples: Float32 | None = None) -> Generator[float, None, Index]:
    """`build` step by step: yields the share that is done, and returns the index. Raises, when begun, what `build` does."""
    made = kind(name)
    if hasattr(made, "build_steps"):
        return (yield from cast(Stepped, made).build_steps(blocks, samples))
    return made.build(blocks, samples)


def build_cost(name: str, tokens: int, kv_heads: int, head_dim: int) -> BuildCost | None:
    """Of an index over one layer, None for a kind that cannot say. Raises UnknownKind."""
    made = kind(name)
    return cast(Priced, made).build_cost(tokens, kv_heads, head_dim) if hasattr(made, "build_cost") else None


def is_priced(name: str) -> bool:
    """Whether `build_cost` can say. Raises UnknownKind."""
    return hasattr(kind(name), "build_cost")


def load(name: str, path: Path, blocks: Blocks) -> Index:
    """What an index of that kind saved. Raises UnknownKind or IndexCorrupt."""
    return kind(name).load(path, blocks)
