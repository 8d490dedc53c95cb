"""One step: tokens of one session or several are appended, and their queries answered.

Several sessions are a step with more rows, of which all take part or none. Where every layer has a runner that takes the step
(`kvdb.session.runner`), that is all of it. Otherwise each layer makes a plan, and its runner goes on by that. What several read
is read once: blocks with which several runs begin, and searches that ask one index for the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any, NamedTuple, Protocol

import numpy as np

import kvdb.validate as validate
from kvdb.attention.device import DeviceFailed, Pending
from kvdb.attention.exact import AttentionStats
from kvdb.attention.shared_prefix import SHARED_TOKENS_MIN, exact_together, sharing_of
from kvdb.catalog.segments.segment_view import SegmentView
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.planning.prepared import Prepared
from kvdb.session.counters import SessionCounters
from kvdb.session.layer import Layer
from kvdb.session.runner import Starts, StepRunner
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, ModelSpec
from query_optimizer.query_options import QueryOptions

ALONE = nullcontext()
"""The context of a session that is asked alone."""


class SteppingSession(Protocol):
    """What a step needs of a session; see `kvdb.session.state.SessionState`."""

    spec: ModelSpec
    snapshot: Snapshot
    counters: SessionCounters
    turns: RLock

    def layer(self, number: int) -> Layer: ...

    def runner(self, layer: int) -> StepRunner | None: ...

    def append(self, layer: Layer, k: Array, v: Array) -> None: ...


Sessions = Sequence[SteppingSession]


class SessionRow(NamedTuple):
    """A session in a step. options: what it is asked, with the session's own default."""

    session: SteppingSession
    layer: Layer
    options: QueryOptions


def answer(sessions: Sessions, layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts = None) -> Array:
    """`SessionState.attend` of each session, all or none: q and the result are `[sessions, q_heads, n, head_dim]`, k and v
    `[sessions, kv_heads, n, head_dim]`.

    starts: the position of each session's first token, as the caller believes. Raises what `attend` raises, then every session is
    as it was; InvalidArgument for a session that is given twice, SpecMismatch for sessions of several models.
    """
    with turns_of(sessions):
        out: Array | None = run(sessions, layer, q, k, v, options, starts)
        if out is not None:
            return out
        validate.starts(starts, len(sessions))
        for what, array in (("q", q), ("k", k), ("v", v)):
            validate.stacked(what, array, len(sessions))
        begins = [None] * len(sessions) if starts is None else starts
        return np.stack(plan(sessions, layer, list(q), list(k), list(v), options, begins))


def run(sessions: Sessions, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts = None) -> Any | None:
    """`answer` by the runners of all sessions, one token of each. None where any of them refuses, or anything is wrong; then
    nothing was done. Raises InvalidArgument for starts that cannot be."""
    with turns_of(sessions):
        runners = [session.runner(layer) for session in sessions if session.spec == sessions[0].spec]
        ready = [runner for runner in runners if runner is not None]
        if len(ready) < len(sessions) or len(set(map(type, ready))) > 1:  # a card that was lost takes no new sessions
            return None
        return ready[0].run_with(ready[1:], q, k, v, options, starts)


def plan(
    sessions: Sessions,
    layer: int,
    q: Sequence[Array],
    k: Sequence[Array],
    v: Sequence[Array],
    options: QueryOptions,
    starts: Sequence[int | None],
) -> list[Array]:
    """`answer` by a plan of each session, by which its runner goes on. q, k, v, the result: the arrays of each session. The
    caller holds the turns."""
    rows = _rows(sessions, layer, options)
    for i, (_, state, _) in enumerate(rows):
        with _numbered(i, rows):
            n = state.check_queries(q[i])
            validate.same_tokens(n, validate.keys_values(state.shape, k[i], v[i]))
            validate.start_of(starts[i], state.run.tokens, layer)
            state.check_no_gaps()
            state.check_window(n, new=True)
    if not n:
        return [np.empty_like(one) for one in q]
    with _appended(rows, k, v):
        out = _answered(rows, q)
    for _, state, _ in rows:
        state.begin(options)
    return out


def attention(sessions: Sessions, layer: int, q: Sequence[Array], options: QueryOptions) -> list[Array]:
    """`SessionState.attention` of each session. q, the result: the arrays of each session.

    Raises what `attention` raises, and what `answer` does for the sessions.
    """
    with turns_of(sessions):
        rows = _rows(sessions, layer, options)
        for i, (_, state, _) in enumerate(rows):
            with _numbered(i, rows):
                n = state.check_queries(q[i])
                state.check_last(n)
        return _answered(rows, q) if n else [np.empty_like(one) for one in q]


def attention_of_all(sessions: Sessions, layer: int, q: Array, options: QueryOptions) -> Array:
    """`attention`; q and the result are `[sessions, q_heads, n, head_dim]`."""
    validate.stacked("q", q, len(sessions))
    return np.stack(attention(sessions, layer, list(q), options))


@contextmanager
def turns_of(sessions: Sessions) -> Iterator[None]:
    """Take the turns of all sessions while the body runs."""
    with ExitStack() as turns:
        for session in sorted(sessions, key=id):  # always in the same order, so that no two calls wait for each other
            turns.enter_context(session.turns)
        yield


def _rows(sessions: Sessions, layer: int, options: QueryOptions) -> list[SessionRow]:
    """Raises SpecMismatch, and what `SessionState.layer` and `Layer.resolve` raise."""
    rows: list[SessionRow] = []
    for i, session in enumerate(sessions):
        with _numbered(i, sessions):
            validate.same_spec(session.spec, sessions[0].spec)
            state = session.layer(layer)
            rows.append(SessionRow(session, state, state.resolve(options)))
    return rows


def _numbered(i: int, rows: Sequence[object]) -> AbstractContextManager[None]:
    """Make an error say which of several sessions it is about."""
    return validate.numbered(i) if len(rows) > 1 else ALONE


@contextmanager
def _appended(rows: Sequence[SessionRow], k: Sequence[Array], v: Sequence[Array]) -> Iterator[None]:
    """Append the tokens of all sessions, or of none if one session's tokens are refused or the body raises. Raises NonFiniteError
    or CapacityError."""
    with ExitStack() as undo:
        for i, (session, layer, _) in enumerate(rows):
            with _numbered(i, rows):
                session.append(layer, k[i], v[i])
            undo.callback(layer.truncate, k[i].shape[1])
        yield
        undo.pop_all()


def _answered(rows: Sequence[SessionRow], q: Sequence[Array]) -> list[Array]:
    """Answer the queries of the last tokens, at least one, by a plan of each session."""
    n = q[0].shape[1]
    prepared = [layer.prepare(one, options) for one, (_, layer, options) in zip(q, rows, strict=True)]
    several = len(rows) > 1 and n == 1
    launched = _launched(rows, prepared, q) if several else {}
    out = _answered_exactly(rows, prepared, q) if several else {}
    for i, (_, layer, options) in enumerate(rows):
        if i not in out:
            out[i], stats = layer.answer_prepared(prepared[i], q[i], options, launched.get(i))
            _count(rows[i], prepared[i], stats)
    return [out[i] for i in range(len(rows))]


def _answered_exactly(rows: Sequence[SessionRow], prepared: Sequence[Prepared], q: Sequence[Array]) -> dict[int, Array]:
    """The answers of those sessions that read everything, of which some share long views; none where no views are shared."""
    exact = [i for i, (_, layer, _) in enumerate(rows) if layer.reads_all(prepared[i], 1) and not len(layer.run.overlaid)]
    sharing = sharing_of([rows[i].session.snapshot.views for i in exact], _is_long)
    if not sharing.groups:
        return {}
    layout, scale = rows[0].layer.tail.layout, rows[0].layer.shape.softmax_scale
    with pinned([page for i in exact for page in rows[i].layer.pages]):
        runs = [rows[i].layer.run for i in exact]
        answers, spent = exact_together(layout, runs, sharing, np.stack([q[i][:, 0] for i in exact]), scale)
    out = {}
    for i, given, stats in zip(exact, answers, spent, strict=True):
        out[i] = given[:, None].astype(q[i].dtype)
        rows[i].layer.answered_exactly(prepared[i], q[i], out[i], stats, rows[i].options)
        _count(rows[i], prepared[i], stats)
    return out


def _count(row: SessionRow, prepared: Prepared, stats: AttentionStats) -> None:
    row.session.counters.count(prepared.plan, stats, row.layer.run.tokens)
    row.layer.runner.planned(stats.kernel_ns)


def _launched(rows: Sequence[SessionRow], prepared: Sequence[Prepared], q: Sequence[Array]) -> dict[int, Pending]:
    """The answers of the GPU that are under way, by the numbers of their sessions; launched together, before the CPU begins."""
    by_device = {i: plan.partition.device for i, plan in enumerate(prepared) if plan.partition.device is not None}
    gpu = rows[0].layer.planner.gpu
    if gpu is None or len(by_device) < 2:
        return {}
    try:
        asked = np.stack([q[i][:, 0] for i in by_device])
        return dict(zip(by_device, gpu.launch(list(by_device.values()), asked), strict=True))
    except DeviceFailed:  # each session tries by itself, and logs what was wrong
        return {}


def _is_long(view: SegmentView) -> bool:
    return view.visible >= SHARED_TOKENS_MIN
