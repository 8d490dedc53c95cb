"""Searches that native code of other packages can call, without knowing the index."""

from dataclasses import astuple
from typing import Any, NewType

import indexes._native as _native
from indexes.base import Float32, Index, Int64, Queries, Words
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

Searcher = NewType("Searcher", object)
"""A search that is prepared for any number of queries: a capsule that holds a `Searcher` of `native/searcher.h`."""
RETRIEVALS = Exact, Dipr, TopK, TopP


def searcher_of(index: Index, retrieval: Retrieval, scale: float, *, estimate_tail: bool, tight: bool = False) -> Searcher:
    """The searcher of an index, which answers as `search` does with `give_up`, over the blocks that the index holds now.

    It is the one that its kind's method `searcher` makes. Where there is none, where that makes none, where a subclass overrides
    `search` alone, and for a `tight` bound, it calls `search`. It is valid until tokens are inserted. Raises ValueError.
    """
    made = None if tight else _own(index, retrieval, scale, estimate_tail)
    return _calling(index, retrieval, scale, estimate_tail, tight) if made is None else made


def _own(index: Index, retrieval: Retrieval, scale: float, estimate_tail: bool) -> Searcher | None:
    """The searcher that the index's kind makes, None for none."""
    for cls in type(index).__mro__:
        if "searcher" in vars(cls):
            made: Searcher | None = vars(cls)["searcher"](index, retrieval, scale, estimate_tail=estimate_tail)
            return made
        if "search" in vars(cls):
            return None
    return None


def _calling(index: Index, retrieval: Retrieval, scale: float, estimate_tail: bool, tight: bool) -> Searcher:
    """A searcher that calls the index's `search`."""

    def search(
        q: Float32, begin: Int64, end: Int64, floor: Float32, outside: Float32, hidden: Words | None, active: Any
    ) -> tuple[Any, ...]:
        queries = Queries(q, index.blocks.kv_heads, scale, begin, end, floor, outside, hidden, active)
        found = index.search(queries, retrieval, estimate_tail=estimate_tail, tight=tight, give_up=True)
        arrays = found.offsets, found.ids, found.scores, found.scanned, found.nbytes, found.missed, found.missed_bound
        return *arrays, found.tail, found.dense

    asked = [RETRIEVALS.index(type(retrieval)), *astuple(retrieval), scale, estimate_tail, tight]
    return Searcher(_native.python_searcher(index.blocks.native, id(index), [float(one) for one in asked], search))
