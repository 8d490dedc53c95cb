"""The kinds of index by name. A kind's module is imported when it is first wanted."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from indexes.base import Float32, Index
from indexes.blocks import Blocks

KINDS: Mapping[str, tuple[str, str]] = {
    "flat": ("indexes.flat", "Flat"),
    "coarse-bounds": ("indexes.coarse.bounds", "Bounds"),
    "coarse-means": ("indexes.coarse.means", "Means"),
    "coarse-clusters": ("indexes.coarse.clusters", "Clusters"),
    "hnsw": ("indexes.hnsw", "Hnsw"),
}
"""Name of a kind, its module and its class; the cheapest to build first."""


class UnknownKind(ValueError):
    """An index kind was named that does not exist."""


class Kind(Protocol):
    """What the class of a kind can do before there is an index."""

    def build(self, blocks: Blocks, samples: Float32 | None = None) -> Index: ...

    def load(self, path: Path, blocks: Blocks) -> Index: ...


def kind(name: str) -> Kind:
    """The class of that name. Raises UnknownKind."""
    if name not in KINDS:
        raise UnknownKind(f"no kind of index is named {name!r}; expected one of {', '.join(KINDS)}")
    module, cls = KINDS[name]
    return cast(Kind, getattr(import_module(module), cls))


def build(name: str, blocks: Blocks, samples: Float32 | None = None) -> Index:
    """An index of that kind over `blocks`. samples: queries `[q_heads, m, head_dim]` for the kinds that learn from some.

    Raises UnknownKind, and ModuleNotFoundError for a kind whose library is not installed.
    """
    return kind(name).build(blocks, samples)


def load(name: str, path: Path, blocks: Blocks) -> Index:
    """What an index of that kind saved. Raises UnknownKind or IndexCorrupt."""
    return kind(name).load(path, blocks)
