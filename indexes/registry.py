"""The kinds of index by name."""

from collections.abc import Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

from indexes.accelerate import Accelerator
from indexes.base import BuildCost, Float32, Index
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.flat import Flat
from indexes.hnsw import Hnsw
from indexes.quantized import Quantized


class UnknownKind(ValueError):
    """An index kind was named that does not exist."""


class NoKind(ValueError):
    """A class cannot be a kind of index: it lacks something, or its name is taken."""


class Kind(Protocol):
    """The class of a kind: what it can do before there is an index."""

    @property
    def kind(self) -> str: ...

    @property
    def walks(self) -> bool: ...

    def build(self, blocks: Blocks, query_samples: Float32 | None = None) -> Index: ...

    def load(self, path: Path, blocks: Blocks) -> Index: ...


class Priced(Protocol):
    """A kind that says beforehand what an index costs; others are built only where somebody asks for them."""

    def build_cost(self, tokens: int, kv_heads: int, head_dim: int) -> BuildCost: ...


class Stepped(Protocol):
    """A kind whose builds take long, so that they can pause or stop between their steps."""

    def build_steps(self, blocks: Blocks, query_samples: Float32 | None = None) -> Generator[float, None, Index]: ...


class Accelerated(Protocol):
    """A kind whose builds an accelerator speeds up, which says so with `accelerated = True`. A build goes on without one that is
    lost."""

    accelerated: bool

    def build(self, blocks: Blocks, query_samples: Float32 | None = None, *, accelerator: Accelerator | None = None) -> Index: ...


class AcceleratedStepped(Protocol):
    """An accelerated kind that builds in steps."""

    def build_steps(
        self, blocks: Blocks, query_samples: Float32 | None = None, *, accelerator: Accelerator | None = None
    ) -> Generator[float, None, Index]: ...


K = TypeVar("K", bound=Kind)
_kinds: dict[str, Kind] = {index.kind: index for index in (Flat, Quantized, Bounds, Means, Clusters, Hnsw)}
KINDS: Mapping[str, Kind] = MappingProxyType(_kinds)
"""The kinds by name, the cheapest to build first; those that were registered come last."""
ATTRIBUTES = {"kind": str, "walks": bool, "estimates_tail": bool}
VERBS = ("build", "insert", "search", "verify", "save", "load", "cost", "nbytes")


def register(cls: K) -> K:
    """Add a kind of index from outside, for the whole process; also as a decorator of its class. Doing so twice does nothing.

    cls: what `indexes.base.Index` asks for, and `build` as a class method. Raises NoKind for one that lacks something, or a name
    that is taken.
    """
    lacking = [name for name, of in ATTRIBUTES.items() if not isinstance(getattr(cls, name, None), of)]
    lacking += [name for name in VERBS if not hasattr(cls, name)]
    if lacking:
        raise NoKind(f"{cls!r} lacks {', '.join(lacking)}; expected a class with all that indexes.base.Index says, and build")
    if _kinds.setdefault(cls.kind, cls) is not cls:
        raise NoKind(f"a kind of index is named {cls.kind!r} already; expected a name that is none of {', '.join(_kinds)}")
    return cls


def kind(name: str) -> Kind:
    """The class of the kind with that name. Raises UnknownKind."""
    if name not in KINDS:
        raise UnknownKind(f"no kind of index is named {name!r}; expected one of {', '.join(KINDS)}")
    return KINDS[name]


def missing_library(name: str) -> str | None:
    """The library that building an index of that kind needs and that is not installed, or None.

    A kind names the library in `library`, if it needs one. Raises UnknownKind.
    """
    library: str | None = getattr(kind(name), "library", None)
    return library if library is not None and find_spec(library) is None else None


def build(name: str, blocks: Blocks, query_samples: Float32 | None = None) -> Index:
    """Build an index of that kind over `blocks`. query_samples: queries `[q_heads, m, head_dim]`, for the kinds that learn from
    them.

    Raises UnknownKind, and ModuleNotFoundError for a kind whose library is not installed.
    """
    return kind(name).build(blocks, query_samples)


def build_steps(
    name: str, blocks: Blocks, query_samples: Float32 | None = None, accelerator: Accelerator | None = None
) -> Generator[float, None, Index]:
    """`build` step by step: yields the share that is done, and returns the index. Raises what `build` does at its first step.

    accelerator: a device that helps to build the kinds that know how to use it, None for none.
    """
    made = kind(name)
    if accelerator is not None and getattr(made, "accelerated", False):
        if hasattr(made, "build_steps"):
            return (yield from cast(AcceleratedStepped, made).build_steps(blocks, query_samples, accelerator=accelerator))
        return cast(Accelerated, made).build(blocks, query_samples, accelerator=accelerator)
    if hasattr(made, "build_steps"):
        return (yield from cast(Stepped, made).build_steps(blocks, query_samples))
    return made.build(blocks, query_samples)


def build_cost(name: str, tokens: int, kv_heads: int, head_dim: int) -> BuildCost | None:
    """The expected cost of an index over one layer, None for a kind that cannot say. Raises UnknownKind."""
    made = kind(name)
    return cast(Priced, made).build_cost(tokens, kv_heads, head_dim) if hasattr(made, "build_cost") else None


def is_priced(name: str) -> bool:
    """Whether `build_cost` knows the cost of this kind. Raises UnknownKind."""
    return hasattr(kind(name), "build_cost")


def load(name: str, path: Path, blocks: Blocks) -> Index:
    """Load an index that this kind saved. Raises UnknownKind or IndexCorrupt."""
    return kind(name).load(path, blocks)
