"""Attention over the tokens that a query needs: some blocks are read whole, the rest is searched.

The window and whatever has no index are one part; every index that is searched is another. The parts are answered one after
the other, so that each search starts from the largest score and the mass that those before it have seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter, perf_counter_ns

import numpy as np
import numpy.typing as npt

import kvdb._native as _native
from indexes.base import Float32, Found, Index, Queries
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP, Wanted
from indexes.widen import widened
from kvdb.attention import execute
from kvdb.attention.execute import Reading, Whole
from kvdb.attention.observe import largest, observation
from kvdb.attention.run import Counts, Run
from kvdb.attention.state import AttentionState, merge
from kvdb.storage.block import BlockLayout, bits
from kvdb.types import Addresses, Array, Observation

DENSE = 0.04
"""Where queries need a larger share of the searched tokens than this, reading all of them is cheaper than picking."""
DENSE_HEADS = 0.5
"""Where more KV heads than this share need to be read whole, all are: a page holds the tokens of all heads."""


@dataclass(frozen=True)
class Searched:
    """Tokens [begin, end) of one segment or tail, found by an index. first_block: where its blocks begin in the run. observe:
    takes what the search for an observed question shows."""

    index: Index
    begin: int
    end: int
    first_block: int
    observe: Callable[[Observation], None] | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class Sections:
    """How one layer's run is divided: what is searched, whole blocks each, and everything else."""

    def __init__(self, searched: Sequence[Searched], block_size: int) -> None:
        self.searched = tuple(searched)
        self.tokens = sum(part.tokens for part in searched)
        self._edges: list[tuple[int, int]] = []
        at = 0
        for part in searched:
            assert part.begin % block_size == part.end % block_size == 0
            self._edges.append((at, part.first_block + part.begin // block_size))
            at = part.first_block + part.end // block_size
        self._rest = at
        self._before: tuple[Addresses, Counts] | None = None

    def read_whole(self, run: Run) -> tuple[Addresses, Counts]:
        """The blocks that are not searched. run: always the same one, which may grow behind what is searched."""
        if self._before is None:
            slices = [slice(*edge) for edge in self._edges] or [slice(0)]
            self._before = np.concatenate([run.addresses[s] for s in slices]), np.concatenate([run.counts[s] for s in slices])
        addresses, counts = self._before
        return np.concatenate([addresses, run.addresses[self._rest :]]), np.concatenate([counts, run.counts[self._rest :]])


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


def sparse(question: Question, sections: Sections, retrieval: Retrieval) -> tuple[AttentionState, Reading]:
    """The attention of a question over what `retrieval` asks for, widened until the bound it wants holds."""
    started = perf_counter_ns()
    layout, q = question.layout, question.q
    addresses, counts = sections.read_whole(question.run)
    first = execute.whole(layout, addresses, counts, q, q.shape[1], question.scale)
    q32 = np.ascontiguousarray(q, dtype=np.float32)
    limit = question.wanted.missed_mass_max
    seen = Seen(question.run.tokens - sections.tokens)
    for attempt, tight in widened(retrieval, sections.tokens):
        founds, seconds = _search(question, sections, q32, first, attempt, tight)
        # Of queries that a search left, reading everything says what is the largest.
        top = largest(founds, first.top) if question.observed and attempt is retrieval and not tight else None
        seen.add(layout, founds)
        dense = _dense(founds, layout.kv_heads)
        dense_share = 0.0 if dense is None else float(dense.mean())
        if isinstance(attempt, Exact) or dense_share > DENSE_HEADS or _many(founds, q32, sections):
            state, reading = execute.exact(layout, question.run, q, q.shape[1], question.scale, top)
            if top is not None:
                _observe(question, sections, founds, seconds, first.top, top, state.lse)
            nbytes = reading.nbytes + seen.nbytes
            return state, replace(reading, nbytes=nbytes, kernel_ns=perf_counter_ns() - started)
        state = _attend(question, sections, first, founds)
        if dense is not None:
            founds = _read_dense(question, dense, state, founds, top)
        if top is not None:
            lse = reduce(np.logaddexp, (found.missed for found in founds), state.lse)
            _observe(question, sections, founds, seconds, first.top, top, lse)
        missed, _ = _share([found.missed for found in founds], state.lse)
        bound, bound_max = _share([found.missed_bound for found in founds], state.lse)
        if limit is None or bound_max <= limit:
            break
    state = _with_tail(state, founds) if question.wanted.estimate_tail else state
    reading = Reading(
        scanned=seen.scanned + dense_share * sections.tokens,
        retrieved=seen.whole + sum(len(f.ids) for f in founds) / (q.shape[0] * q.shape[1]) + dense_share * sections.tokens,
        nbytes=seen.nbytes + int((seen.whole + dense_share * question.run.tokens) * layout.token_nbytes),
        kernel_ns=perf_counter_ns() - started,
        missed=missed,
        missed_bound=bound,
        missed_bound_max=bound_max,
    )
    return AttentionState(state.out.astype(q.dtype, copy=False), state.lse), reading


class Seen:
    """Tokens looked at and bytes read by the searches of one call. whole: tokens read whole."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.scanned: float = whole
        self.nbytes = 0

    def add(self, layout: BlockLayout, founds: Sequence[Found]) -> None:
        for found in founds:
            self.scanned += found.scanned / layout.kv_heads
            self.nbytes += found.nbytes + len(found.ids) * layout.token_nbytes // (2 * layout.kv_heads)  # their values


def _search(
    question: Question, sections: Sections, q: Float32, first: Whole, retrieval: Retrieval, tight: bool
) -> tuple[list[Found], list[float]]:
    """What each searched part finds, and the seconds it took. The largest score and the mass seen so far go from part to part."""
    if isinstance(retrieval, Exact):
        return [], []
    n = q.shape[1]
    floor, outside = first.top, first.state.lse
    if isinstance(retrieval, TopK):
        retrieval = TopK(min(retrieval.k, sections.tokens))  # any number may be asked for
    if isinstance(retrieval, TopP) and len(sections.searched) > 1:
        retrieval = TopP(1 - (1 - retrieval.p) / len(sections.searched))  # each part may miss its share of what all may
    founds: list[Found] = []
    seconds: list[float] = []
    for part in sections.searched:
        started = perf_counter()
        begin, end = np.full(n, part.begin, np.int64), np.full(n, part.end, np.int64)
        queries = Queries(q, question.layout.kv_heads, question.scale, begin, end, floor, outside)
        found = part.index.search(queries, retrieval, estimate_tail=question.wanted.estimate_tail, tight=tight, give_up=True)
        founds.append(found)
        seconds.append(perf_counter() - started)
        if len(sections.searched) == 1 or (found.dense is not None and found.dense.all()):
            return founds, seconds
        floor = np.maximum(floor, _largest(found, floor.shape))
    if question.wanted.estimate_tail:  # what was found is better than an estimate of it
        return founds, seconds
    cut = _cut(founds, floor, question.scale, retrieval)
    return [_trimmed(found, cut.ravel(), question.scale) for found in founds], seconds


def _observe(
    question: Question,
    sections: Sections,
    founds: Sequence[Found],
    seconds: Sequence[float],
    window_top: Float32,
    top: Float32,
    lse: Float32,
) -> None:
    """Tells the parts what the search of them showed. top, lse: of everything, as far as they are known."""
    heads = question.layout.kv_heads
    for part, found, spent in zip(sections.searched, founds, seconds, strict=False):  # some may not have been searched any more
        if part.observe is not None:
            shown = found, heads, part.tokens, None, window_top, lse, question.scale, part.index.kind, spent, top
            part.observe(observation(*shown))


def _dense(founds: Sequence[Found], kv_heads: int) -> npt.NDArray[np.bool_] | None:
    """bool `[kv_heads]`: those of which some query was left unanswered by some part; None for none."""
    left = [found.dense for found in founds if found.dense is not None and np.count_nonzero(found.dense)]
    return np.any([dense.reshape(kv_heads, -1).any(axis=1) for dense in left], axis=0) if left else None


def _many(founds: Sequence[Found], q: Float32, sections: Sections) -> bool:
    return bool(sum(len(found.ids) for found in founds) > DENSE * q.shape[0] * q.shape[1] * sections.tokens)


def _read_dense(
    question: Question, dense: npt.NDArray[np.bool_], state: AttentionState, founds: Sequence[Found], top: Float32 | None
) -> list[Found]:
    """Overwrites the rows of the dense KV heads in the state, and in `top`, with those of attention over everything. Returns what
    is missed without them."""
    run, q = question.run, question.q
    call = (question.layout.native, bits(q), run.addresses, run.counts, q.shape[1], question.scale, bits(state.out), state.lse)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], dense, [False]])))
    for begin, end in edges.reshape(-1, 2).tolist():
        _native.attend(*call, top, begin, end)
    rows = np.repeat(dense, len(q) // len(dense))[:, None]
    nothing = np.float32(-np.inf)
    return [
        replace(found, missed=np.where(rows, nothing, found.missed), missed_bound=np.where(rows, nothing, found.missed_bound))
        for found in founds
    ]


def _attend(question: Question, sections: Sections, first: Whole, founds: Sequence[Found]) -> AttentionState:
    """The state over what is read whole and what was found, float32 as long as something is to be merged with it."""
    state, last = first.state, len(founds) - 1
    nothing_cut = np.full(state.lse.shape, -np.inf, np.float32)
    for i, (part, found) in enumerate(zip(sections.searched, founds, strict=True)):
        wide = i < last or question.wanted.estimate_tail
        to = AttentionState(np.empty(state.out.shape, np.float32 if wide else question.q.dtype), np.empty_like(state.lse))
        wanted = part.index.blocks.table, found.offsets, found.ids, found.scores, nothing_cut, question.scale
        _native.attend_found(question.layout.native, *wanted, state.out, state.lse, bits(to.out), to.lse)
        state = to
    return state


def _cut(founds: Sequence[Found], floor: Float32, scale: float, retrieval: Retrieval) -> Float32:
    """The smallest score that counts now that every part is known, float32 `[q_heads, n]`. floor: the largest of all."""
    if isinstance(retrieval, Dipr):
        return np.asarray(floor - np.float32(retrieval.beta(scale)), np.float32)
    if isinstance(retrieval, TopK):
        return _kth(founds, retrieval.k).reshape(floor.shape)
    return np.full(floor.shape, -np.inf, np.float32)


def _trimmed(found: Found, cut: Float32, scale: float) -> Found:
    """What reaches the cut of its row, float32 `[rows]`; the mass of the rest counts as missed."""
    counts = np.diff(found.offsets)
    keep = found.scores >= np.repeat(cut, counts)
    if keep.all():
        return found
    rows = np.repeat(np.arange(len(counts)), counts)
    lost, limit = rows[~keep], scale * cut.astype(np.float64)
    mass = np.bincount(lost, np.exp(scale * found.scores[~keep] - limit[lost]), len(counts))
    with np.errstate(divide="ignore"):
        log_mass = (np.log(mass) + limit).reshape(found.missed.shape)
    missed, bound = (np.logaddexp(log, log_mass) for log in (found.missed, found.missed_bound))
    return replace(
        found,
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rows[keep], minlength=len(counts)))]).astype(np.int64),
        ids=found.ids[keep],
        scores=found.scores[keep],
        missed=missed.astype(np.float32),
        missed_bound=np.nextafter(bound.astype(np.float32), np.float32(np.inf)),
    )


def _kth(founds: Sequence[Found], k: int) -> Float32:
    """The k-th largest score of each row over all parts, -inf for rows of fewer."""
    rows = len(founds[0].offsets) - 1
    kth = np.full(rows, -np.inf, np.float32)
    for row in range(rows):
        scores = np.concatenate([f.scores[f.offsets[row] : f.offsets[row + 1]] for f in founds])
        if len(scores) > k:
            kth[row] = np.partition(scores, len(scores) - k)[len(scores) - k]
    return kth


def _largest(found: Found, shape: tuple[int, ...]) -> Float32:
    """The largest score of each row, -inf for rows that found nothing."""
    largest = np.full(len(found.offsets) - 1, -np.inf, np.float32)
    filled = np.flatnonzero(np.diff(found.offsets))
    if len(filled):
        largest[filled] = np.maximum.reduceat(found.scores, found.offsets[filled])
    return largest.reshape(shape)


def _share(missed: Sequence[Float32], lse: Float32) -> tuple[float, float]:
    """Of the whole softmax mass, what the logarithms of missed sums come to beside the sum that was read: mean and largest."""
    total = missed[0] if len(missed) == 1 else np.logaddexp.reduce(np.stack(missed).astype(np.float64), axis=0)
    return _native.share(np.asarray(total, np.float32), lse)


def _with_tail(state: AttentionState, founds: Sequence[Found]) -> AttentionState:
    """The state with the estimates of what was not found merged in, where an index makes one."""
    tails = [AttentionState(found.tail, found.missed) for found in founds if found.tail is not None]
    return merge([state, *tails]) if tails else state
