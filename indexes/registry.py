"""The kinds of index by name."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar, cast

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
    """A kind of index was named that does not exist."""


class NoKind(ValueError):
    """A class cannot be a kind of index: it lacks something, or its name is taken."""


class IndexKind(Protocol):
    """The class of a kind: what can be asked before an index of it is built.

    One whose builds take long may have `build_steps` too, a generator of the share that is done which returns the index, so that
    builds can pause or stop between its steps. With `accelerated = True` both take an `accelerator=`, and go on without it when
    it is lost.
    """

    @property
    def kind(self) -> str: ...

    @property
    def walks(self) -> bool: ...

    def build(self, blocks: Blocks, query_samples: Float32 | None = None) -> Index: ...

    def load(self, path: Path, blocks: Blocks) -> Index: ...


class Priced(Protocol):
    """A kind that knows the cost of an index beforehand. Kinds that do not are built only where somebody asks for them."""

    def build_cost(self, tokens: int, kv_heads: int, head_dim: int) -> BuildCost: ...


K = TypeVar("K", bound=IndexKind)
ATTRIBUTES = {"kind": str, "walks": bool, "estimates_tail": bool}
VERBS = ("build", "insert", "search", "verify", "save", "load", "cost", "nbytes")


class Kinds(Mapping[str, IndexKind]):
    """Kinds by name. Thread-safe: the dictionary is replaced and never changed, so whoever goes through it meets no change."""

    def __init__(self, kinds: Iterable[IndexKind]) -> None:
        self._kinds = {kind.kind: kind for kind in kinds}
        self._lock = Lock()

    def __getitem__(self, name: str) -> IndexKind:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, kind: IndexKind) -> bool:
        """Add a kind behind the others. Returns False, and adds nothing, where another has its name."""
        with self._lock:
            known = self._kinds.get(kind.kind, kind)
            self._kinds = {**self._kinds, kind.kind: known}
            return known is kind


KINDS = Kinds((Flat, Quantized, Bounds, Means, Clusters, Hnsw))
"""The kinds by name. The cheapest to build comes first; kinds registered from outside come last."""


def register(cls: K) -> K:
    """Add a kind of index from outside, for the whole process; it is also a decorator for the class. Adding a class twice does
    nothing.

    cls: a class with everything in `indexes.base.Index`, and `build` as a class method. Raises NoKind for a class that lacks
    something, or whose name is taken.
    """
    lacking = [name for name, of in ATTRIBUTES.items() if not isinstance(getattr(cls, name, None), of)]
    lacking += [name for name in VERBS if not hasattr(cls, name)]
    if lacking:
        raise NoKind(f"{cls!r} lacks {', '.join(lacking)}; expected a class with all that indexes.base.Index says, and build")
    if not KINDS.add(cls):
        raise NoKind(f"a kind of index is named {cls.kind!r} already; expected a name that is none of {', '.join(KINDS)}")
    return cls


def kind(name: str) -> IndexKind:
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
    """`build` step by step: yields the share that is done, and returns the index. The first step raises what `build` raises.

    accelerator: a device that helps to build the kinds that know how to use it, None for none.
    """
    made: Any = kind(name)
    helped = accelerator is not None and getattr(made, "accelerated", False)
    given = {"accelerator": accelerator} if helped else {}
    index: Index
    if hasattr(made, "build_steps"):
        index = yield from made.build_steps(blocks, query_samples, **given)
    else:
        index = made.build(blocks, query_samples, **given)
    return index


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
