"""Attention over the tokens that a query needs: some blocks are read whole, the rest is searched.

The window and whatever has no index are one part; every index that is searched is another. The parts are answered one after
the other, so that each search starts from the largest score and the mass that those before it have seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter_ns

import numpy as np

import kvdb._native as _native
from indexes.base import Float32, Found, Queries
from indexes.retrieval import Exact, Retrieval, TopK, TopP
from indexes.widen import widened
from kvdb.attention import execute
from kvdb.attention.execute import Reading, Search, Whole
from kvdb.attention.observe import largest, observation
from kvdb.attention.run import Run
from kvdb.attention.sections import ReadWhole, Sections
from kvdb.attention.state import AttentionState, merge
from kvdb.attention.trim import cut_of, emptied, largest_of, trimmed
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Array
from query_optimizer.wanted import Wanted

DENSE = 0.04
"""Where queries need a larger share of the searched tokens than this, reading all of them is cheaper than picking."""
DENSE_HEADS = 0.5
"""Where more KV heads than this share need to be read whole, all are: a page holds the tokens of all heads."""


@dataclass(frozen=True)
class Question:
    """One call: queries q, `[q_heads, n, head_dim]` in the layout's dtype, of the run's last n tokens. observed: whether its
    searches are told to the parts that were searched; n is 1 then."""

    layout: BlockLayout
    run: Run
    q: Array
    scale: float
    wanted: Wanted
    observed: bool = False

    def searches(self, sections: Sections) -> bool:
        """Whether what is searched can be: a query of an earlier token sees less than the searched parts hold."""
        return bool(sections.searched) and self.q.shape[1] <= sections.behind(self.run)


def sparse(question: Question, sections: Sections, retrieval: Retrieval) -> tuple[AttentionState, Reading]:
    """The attention of a question over what `retrieval` asks for, widened until the bound it wants holds.

    retrieval: for the searched parts that name none of their own.
    """
    started = perf_counter_ns()
    layout, q = question.layout, question.q
    reads = sections.read_whole(question.run)
    first = execute.whole(layout, reads, q, sections.causal(q.shape[1]), question.scale)
    window_ns = perf_counter_ns() - started
    q32 = np.ascontiguousarray(q, dtype=np.float32)
    limit = question.wanted.missed_mass_max
    seen = Seen(int(reads.counts.sum()))
    for attempt, tight in widened(retrieval, sections.tokens):
        searches = _search(question, sections, q32, first, None if limit is None else attempt, attempt, tight)
        # Of queries that a search left, reading everything says what is the largest.
        observed = question.observed and attempt is retrieval and not tight
        seen.add(layout, searches)
        left, founds = _left(sections, searches, layout.kv_heads)
        top = largest(founds, first.top) if observed else None
        left_share = sum(part.span.tokens * float(part.heads.mean()) for part in left) / max(sections.tokens, 1)
        if isinstance(attempt, Exact) or left_share > DENSE_HEADS or _many(founds, q32, sections):
            state, reading = exact(question, sections, top)
            if top is not None:
                _observe(question, searches, first, top, state.lse)
            spent = perf_counter_ns() - started
            return state, replace(reading, nbytes=reading.nbytes + seen.nbytes, kernel_ns=spent, searches=tuple(searches))
        state = _attend(question, sections, first, founds, merges=bool(left))
        for part in left:
            _read_left(question, sections, part, state, top)
        if top is not None:
            _observe(question, searches, first, top, reduce(np.logaddexp, (found.missed for found in founds), state.lse))
        missed, _ = _share([found.missed for found in founds], state.lse)
        bound, bound_max = _share([found.missed_bound for found in founds], state.lse)
        if limit is None or bound_max <= limit:
            break
    lse = state.lse
    state = _with_tail(question, state, founds)
    read_whole = left_share * sections.tokens
    reading = Reading(
        scanned=seen.scanned + read_whole,
        retrieved=seen.whole + sum(len(f.ids) for f in founds) / (q.shape[0] * q.shape[1]) + read_whole,
        nbytes=seen.nbytes + int((seen.whole + read_whole) * layout.token_nbytes),
        kernel_ns=perf_counter_ns() - started,
        missed=missed,
        missed_bound=bound,
        missed_bound_max=bound_max,
        searches=tuple(searches),
        window=first,
        window_ns=window_ns,
        lse=lse,
    )
    return AttentionState(state.out.astype(q.dtype, copy=False), state.lse), reading


def exact(question: Question, sections: Sections, top: Array | None = None) -> tuple[AttentionState, Reading]:
    """Attention over everything that is not answered elsewhere. top: as `execute.exact` takes it."""
    layout, run, q = question.layout, question.run, question.q
    if sections.away is None:
        return execute.exact(layout, run, q, q.shape[1], question.scale, top)
    return execute.exact_over(layout, sections.here(run), q, sections.causal(q.shape[1]), question.scale, top)


class Seen:
    """Tokens looked at and bytes read by the searches of one call. whole: tokens read whole."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.scanned: float = whole
        self.nbytes = 0

    def add(self, layout: BlockLayout, searches: Sequence[Search]) -> None:
        for found in (search.found for search in searches):
            self.scanned += found.scanned / layout.kv_heads
            self.nbytes += found.nbytes + len(found.ids) * layout.token_nbytes // (2 * layout.kv_heads)  # their values


def _search(  # what is asked of all parts, and of each
    question: Question,
    sections: Sections,
    q: Float32,
    first: Whole,
    widened_to: Retrieval | None,
    usual: Retrieval,
    tight: bool,
) -> list[Search]:
    """What each searched part finds. The largest score and the mass seen so far go from part to part.

    widened_to: in place of what the parts name, once a bound is to hold; usual: for those that name nothing.
    """
    if isinstance(usual, Exact):
        return []
    n = q.shape[1]
    floor, outside = first.top, first.state.lse
    searches: list[Search] = []
    for part in sections.searched:
        retrieval = _shared(widened_to or part.retrieval or usual, sections)
        begin, end = np.full(n, part.span.begin, np.int64), np.full(n, part.span.end, np.int64)
        turned = q if part.turn is None else part.turn(q)
        heads = question.layout.kv_heads
        queries = Queries(turned, heads, question.scale, begin, end, floor, outside, part.hidden, part.asked)
        tail = part.estimate_tail or question.wanted.estimate_tail
        started = perf_counter_ns()
        found = part.index.search(queries, retrieval, estimate_tail=tail, tight=tight, give_up=True)
        searches.append(Search(part, retrieval, found, perf_counter_ns() - started))
        if len(sections.searched) == 1 or (found.dense is not None and found.dense.all()):
            return searches
        floor = np.maximum(floor, largest_of(found, floor.shape))
    return _trimmed(searches, floor, question)


def _shared(retrieval: Retrieval, sections: Sections) -> Retrieval:
    """What is asked of one of several parts, so that all of them together come to what is wanted."""
    if isinstance(retrieval, TopK):
        return TopK(min(retrieval.k, sections.tokens))  # any number may be asked for
    if isinstance(retrieval, TopP) and len(sections.searched) > 1:
        return TopP(1 - (1 - retrieval.p) / len(sections.searched))  # each part may miss its share of what all may
    return retrieval


def _trimmed(searches: list[Search], floor: Float32, question: Question) -> list[Search]:
    """The searches without what no longer counts; where a tail is estimated, what was found is better than an estimate of it."""
    for retrieval in {search.retrieval for search in searches}:
        alike = [i for i, search in enumerate(searches) if search.retrieval == retrieval and search.found.tail is None]
        if alike and not question.wanted.estimate_tail:
            cut = cut_of([searches[i].found for i in alike], floor, question.scale, retrieval).ravel()
            for i in alike:
                searches[i] = replace(searches[i], found=trimmed(searches[i].found, cut, question.scale))
    return searches


def _left(sections: Sections, searches: Sequence[Search], kv_heads: int) -> tuple[list[ReadWhole], list[Found]]:
    """What of the searched parts is to be read whole, and what was found of the rest.

    As planned, and the KV heads where an index gave up on some query.
    """
    left, founds = list(sections.whole), []
    for search in searches:
        found, dense = search.found, search.found.dense
        if dense is not None and np.count_nonzero(dense):
            heads = np.asarray(dense.reshape(kv_heads, -1).any(axis=1), np.bool_)
            left.append(ReadWhole(search.part.span, heads))
            found = emptied(found, np.repeat(heads, dense.size // kv_heads))
        founds.append(found)
    return left, founds


def _many(founds: Sequence[Found], q: Float32, sections: Sections) -> bool:
    return bool(sum(len(found.ids) for found in founds) > DENSE * q.shape[0] * q.shape[1] * sections.tokens)


def _attend(question: Question, sections: Sections, first: Whole, founds: Sequence[Found], merges: bool) -> AttentionState:
    """The state over what is read whole and what was found, float32 as long as something is to be merged with it."""
    state, last = first.state, len(founds) - 1
    merges = merges or any(found.tail is not None for found in founds)
    for i, (part, found) in enumerate(
        zip(sections.searched, founds, strict=False)
    ):  # fewer, where a search gave up on everything
        dtype = np.float32 if merges or i < last else question.q.dtype
        to = AttentionState(np.empty(state.out.shape, dtype), np.empty_like(state.lse))
        wanted = part.index.blocks.table, found.offsets, found.ids, found.scores, question.scale
        _native.attend_found(question.layout.native, *wanted, state.out, state.lse, bits(to.out), to.lse)
        state = to
    return state


def _observe(question: Question, searches: Sequence[Search], first: Whole, top: Float32, lse: Float32) -> None:
    """Tells the parts what the search of them showed. top, lse: of everything, as far as they are known."""
    heads = question.layout.kv_heads
    for search in searches:
        part = search.part
        if part.observe is not None:
            shown = search.found, heads, part.span.tokens, part.asked, first.top, lse, question.scale
            part.observe(observation(*shown, part.index.kind, search.ns / 1e9, top))


def _read_left(question: Question, sections: Sections, part: ReadWhole, state: AttentionState, top: Float32 | None) -> None:
    """Merges attention over all of a span into the state's rows of some KV heads, and their largest q.k into `top`."""
    reads = sections.blocks(question.run, part.span)
    out, lse = np.empty(state.out.shape, np.float32), np.empty_like(state.lse)
    heads = np.flatnonzero(part.heads).tolist()
    largest_here = None if top is None else np.empty_like(lse)
    execute.attend_heads(question.layout, reads, question.q, question.scale, heads, out, lse, largest_here)
    rows = np.repeat(part.heads, len(out) // len(part.heads))
    whole = merge([AttentionState(state.out[rows], state.lse[rows]), AttentionState(out[rows], lse[rows])])
    state.out[rows], state.lse[rows] = whole.out, whole.lse
    if top is not None and largest_here is not None:
        top[rows] = np.maximum(top[rows], largest_here[rows])


def _share(missed: Sequence[Float32], lse: Float32) -> tuple[float, float]:
    """Of the whole softmax mass, what the logarithms of missed sums come to beside the sum that was read: mean and largest."""
    if not missed:
        return 0.0, 0.0
    total = missed[0] if len(missed) == 1 else np.logaddexp.reduce(np.stack(missed).astype(np.float64), axis=0)
    return _native.share(np.asarray(total, np.float32), lse)


def _with_tail(question: Question, state: AttentionState, founds: Sequence[Found]) -> AttentionState:
    """The state with the estimates of what was not found merged in, where an index makes one."""
    tails = [(found.tail, found.missed) for found in founds if found.tail is not None]
    for i, (out, missed) in enumerate(tails):
        dtype = question.q.dtype if i + 1 == len(tails) else np.float32
        to = AttentionState(np.empty(state.out.shape, dtype), np.empty_like(state.lse))
        _native.merge_tail(question.layout.native, state.out, state.lse, out, missed, bits(to.out), to.lse)
        state = to
    return state
