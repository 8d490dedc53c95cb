"""Searches the parts of one call, one after the other, and finds the KV heads that are read whole because an index gave up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

import numpy as np

from indexes.base import Float32, Queries, SearchResult
from indexes.retrieval import Exact, Retrieval, TopK, TopP
from kvdb.attention.block_run import BlockRun
from kvdb.attention.exact import IndexSearch, WindowAttention
from kvdb.attention.merge_found import cut_of, emptied, largest_of, trimmed
from kvdb.attention.partition import ExactSpan, HeadMask, RunPartition
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import Array
from query_optimizer.query_options import QueryOptions

FOUND_SHARE_MAX = 0.04
"""If more than this share of the searched tokens was found, reading all of them costs less than picking the found ones."""
WHOLE_SHARE_MAX = 0.5
"""If more than this share of the KV heads is to be read whole, all are, because a page holds the tokens of all heads."""


@dataclass(frozen=True)
class AttentionQuery:
    """One call: queries q, `[q_heads, n, head_dim]` in the layout's dtype, which belong to the run's last n tokens.

    observed: whether the searched parts receive an observation; n is 1 then. judged: whether KV heads are read whole for queries
    that are unlike those for which their ways were proven (`RunPartition.ranges`).
    """

    layout: BlockLayout
    run: BlockRun
    q: Array
    scale: float
    options: QueryOptions
    observed: bool = False
    judged: bool = True

    def searches(self, partition: RunPartition) -> bool:
        """Whether indexes can answer. They cannot if a query belongs to an earlier token, which sees less than the searched parts
        hold."""
        return bool(partition.searched) and self.q.shape[1] <= partition.behind(self.run)

    @property
    def ignores_sinks(self) -> bool:
        """Whether a range begins at the largest score behind the sink tokens: where the caller names no retrieval."""
        return self.options.retrieval is None


def search_parts(  # the query, and how each part is searched
    query: AttentionQuery,
    partition: RunPartition,
    q: Float32,
    window: WindowAttention,
    widened_to: Retrieval | None,
    default: Retrieval,
    tight: bool,
) -> list[IndexSearch]:
    """Search each part in turn. The largest score so far goes from part to part.

    widened_to: replaces the retrievals of the parts where a bound has to hold. default: the retrieval of parts that name none.
    """
    if isinstance(default, Exact):
        return []
    n, kv_heads = q.shape[1], query.layout.kv_heads
    floor, outside = window.floor, window.state.lse
    searches: list[IndexSearch] = []
    for part in partition.searched:
        retrieval = shared_retrieval(widened_to or part.retrieval or default, partition)
        begin, end = np.full(n, part.span.begin, np.int64), np.full(n, part.span.end, np.int64)
        turned = q if part.turn is None else part.turn.back(q)
        queries = Queries(turned, kv_heads, query.scale, begin, end, floor, outside, part.hidden, part.active_heads)
        tail = part.estimate_tail or query.options.estimate_tail
        started = perf_counter_ns()
        result = part.index.search(queries, retrieval, estimate_tail=tail, tight=tight, give_up=True)
        searches.append(IndexSearch(part, retrieval, result, perf_counter_ns() - started))
        if len(partition.searched) == 1 or (result.dense is not None and result.dense.all()):
            return searches
        floor = np.maximum(floor, largest_of(result, floor.shape))
    return _trimmed(searches, floor, query)


def split_results(
    partition: RunPartition, searches: Sequence[IndexSearch], kv_heads: int
) -> tuple[list[ExactSpan], list[SearchResult]]:
    """The searched spans that are read whole for some KV heads, and the results of the other heads.

    The plan names some of these heads, and an index gives up others.
    """
    whole, results = list(partition.whole), []
    for search in searches:
        result, dense = search.result, search.result.dense
        if dense is not None and np.count_nonzero(dense):
            heads = np.asarray(dense.reshape(kv_heads, -1).any(axis=1), np.bool_)
            whole.append(ExactSpan(search.part.span, heads))
            result = emptied(result, np.repeat(heads, dense.size // kv_heads))
        results.append(result)
    return whole, results


def give_up(search: IndexSearch, heads: HeadMask) -> IndexSearch:
    """The search as if the index had given up these KV heads, bool `[kv_heads]`."""
    active = heads if search.part.active_heads is None else heads & search.part.active_heads
    shape = search.result.missed.shape
    dense = np.repeat(active, shape[0] // len(heads))[:, None].repeat(shape[1], axis=1)
    if search.result.dense is not None:
        dense |= search.result.dense
    return replace(search, result=replace(search.result, dense=dense))


def many_given_up(searches: list[IndexSearch], kv_heads: int, tokens: int) -> list[IndexSearch]:
    """The searches as if the index had given up KV heads for which so many tokens were found that reading everything costs less
    than picking them. tokens: the number of searched tokens."""
    most = FOUND_SHARE_MAX * tokens
    if sum(len(search.result.ids) for search in searches) <= most:
        return searches
    found = np.sum([np.diff(search.result.offsets) for search in searches], axis=0)
    many = np.asarray(found.reshape(kv_heads, -1).mean(axis=1) > most, np.bool_)
    return [give_up(search, many) for search in searches] if many.any() else searches


def shared_retrieval(retrieval: Retrieval, partition: RunPartition) -> Retrieval:
    """The retrieval for one of several parts, chosen so that all of them together find what the query needs."""
    if isinstance(retrieval, TopK):
        return TopK(min(retrieval.k, partition.tokens))  # the caller may ask for any number
    if isinstance(retrieval, TopP) and len(partition.searched) > 1:
        return TopP(1 - (1 - retrieval.p) / len(partition.searched))  # each part may miss an equal share of what all may miss
    return retrieval


def _trimmed(searches: list[IndexSearch], floor: Float32, query: AttentionQuery) -> list[IndexSearch]:
    """The searches without tokens that no longer count, now that every part is known.

    Where a tail is estimated they stay, because a found token is better than its estimate.
    """
    for retrieval in {search.retrieval for search in searches}:
        alike = [i for i, search in enumerate(searches) if search.retrieval == retrieval and search.result.tail is None]
        if alike and not query.options.estimate_tail:
            cut = cut_of([searches[i].result for i in alike], floor, query.scale, retrieval).ravel()
            for i in alike:
                searches[i] = replace(searches[i], result=trimmed(searches[i].result, cut, query.scale))
    return searches
