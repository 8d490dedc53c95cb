"""Searches that native code of other packages can call, without knowing the index."""

from typing import NewType

from indexes.base import Index
from indexes.retrieval import Retrieval

Searcher = NewType("Searcher", object)
"""A search that is prepared for any number of queries: a capsule that holds a `Searcher` of `native/searcher.h`."""


def searcher_of(index: Index, retrieval: Retrieval, scale: float, *, estimate_tail: bool) -> Searcher | None:
    """The searcher of an index, as its kind's method `searcher` makes it; None where only its `search` can answer.

    It answers as `search` does with `give_up`, over the blocks that the index holds now, and is valid until tokens are inserted.
    A subclass that overrides `search`, and not `searcher`, is asked by its own `search`. Raises ValueError.
    """
    for cls in type(index).__mro__:
        if "searcher" in vars(cls):
            made: Searcher | None = vars(cls)["searcher"](index, retrieval, scale, estimate_tail=estimate_tail)
            return made
        if "search" in vars(cls):
            return None
    return None
