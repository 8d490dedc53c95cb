"""One call on several sessions of one model: all of them take part or none, and what they share is read once.

Sessions whose plans read everything share the views that they have in common (`kvdb.attention.sharing`); those that search are
answered one after the other, as are calls of several tokens, which make good use of what they read.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

import kvdb.check as check
from kvdb.attention.away import AwayFailed, Pending
from kvdb.attention.sharing import sharing_of
from kvdb.attention.together import exact_together
from kvdb.catalog.segment import SegmentView
from kvdb.layer import Layer
from kvdb.planner import Prepared
from kvdb.session import SessionState
from kvdb.types import Array, ModelSpec
from query_optimizer.wanted import Wanted

Starts = Sequence[int] | None

SHARED_TOKENS_MIN = 2048
"""Each session reads a shorter view as it reads the rest: it stays in the caches, and a merge costs as much."""


class Member(NamedTuple):
    """A session in a call."""

    session: SessionState
    layer: Layer


def attend(
    sessions: Sequence[SessionState], layer: int, q: Array, k: Array, v: Array, wanted: Wanted, starts: Starts = None
) -> Array:
    """`SessionState.attend` of each session, all or none: q and the result are `[sessions, q_heads, n, head_dim]`, k and v
    `[sessions, kv_heads, n, head_dim]`.

    starts: the position of each session's first token, as the caller believes. Raises what `attend` raises, then every session is
    as it was; InvalidArgument for a session that is given twice, SpecMismatch for sessions of several models.
    """
    with _members(sessions, layer) as members:
        spec = sessions[0].spec
        check.starts(starts, len(members))
        for what, array in (("q", q), ("k", k), ("v", v)):
            check.stacked(what, array, len(members))
        for i, (_, state) in enumerate(members):
            with check.numbered(i):
                n = _check(state, q[i], wanted)
                check.same_tokens(n, check.keys_values(spec, k[i], v[i]))
                check.start(None if starts is None else starts[i], state.run.tokens, layer)
                state.check_whole()
        _append(members, k, v)
        return _answer(spec, members, q, wanted)


def attention(sessions: Sequence[SessionState], layer: int, q: Array, wanted: Wanted) -> Array:
    """`SessionState.attention` of each session; q and the result are `[sessions, q_heads, n, head_dim]`.

    Raises what `attention` raises, and what `attend` above does for the sessions.
    """
    with _members(sessions, layer) as members:
        check.stacked("q", q, len(members))
        for i, (_, state) in enumerate(members):
            with check.numbered(i):
                state.check_last(_check(state, q[i], wanted))
        return _answer(sessions[0].spec, members, q, wanted)


@contextmanager
def _members(sessions: Sequence[SessionState], layer: int) -> Iterator[list[Member]]:
    """The sessions, in whose turn the body runs. Raises InvalidArgument, SpecMismatch, and what `SessionState.layer` raises."""
    with ExitStack() as turns:
        for session in sorted(sessions, key=id):  # in one order wherever several are taken, so that no two calls wait in a ring
            turns.enter_context(session.turns)
        members = []
        for i, session in enumerate(sessions):
            with check.numbered(i):
                check.same_spec(session.spec, sessions[0].spec)
                members.append(Member(session, session.layer(layer)))
        yield members


def _check(layer: Layer, q: Array, wanted: Wanted) -> int:
    """How many tokens ask."""
    n = layer.check_queries(q)
    layer.planner.check(wanted)
    return n


def _append(members: Sequence[Member], k: Array, v: Array) -> None:
    """The tokens of all, or of none when one session's are refused. Raises NonFiniteError or CapacityError."""
    with ExitStack() as undo:
        for i, (session, layer) in enumerate(members):
            with check.numbered(i):
                session.append(layer, k[i], v[i])
            undo.callback(layer.take_back, k.shape[2])
        undo.pop_all()


def _answer(spec: ModelSpec, members: Sequence[Member], q: Array, wanted: Wanted) -> Array:
    prepared = [layer.prepare(q[i], wanted) for i, (_, layer) in enumerate(members)]
    launched = _launched(members, prepared, q)
    out = np.empty(q.shape, q.dtype)
    exact = [i for i, (_, layer) in enumerate(members) if _may_share(layer, prepared[i], q.shape[2])]
    sharing = sharing_of([members[i].session.basis.views for i in exact], _worth)
    together = exact if sharing.groups else []
    if together:
        runs = [members[i].layer.run for i in together]
        layout = members[0].layer.tail.layout
        rows, readings = exact_together(layout, runs, sharing, q[together][:, :, 0], spec.softmax_scale)
        out[together] = rows[:, :, None]
        for i, reading in zip(together, readings, strict=True):
            members[i].layer.count(reading, 1, wanted)
            members[i].session.work.count(prepared[i].plan, reading)
    for i in sorted({*range(len(members))} - {*together}):
        out[i], reading = members[i].layer.answer_by(prepared[i], q[i], wanted, launched.get(i))
        members[i].session.work.count(prepared[i].plan, reading)
    return out


def _launched(members: Sequence[Member], prepared: Sequence[Prepared], q: Array) -> dict[int, Pending]:
    """What the GPU answers of sessions, by their numbers: launched together, before the CPU begins with its own."""
    aways = {i: plan.sections.away for i, plan in enumerate(prepared) if plan.sections.away is not None}
    gpu = members[0].layer.planner.gpu
    if gpu is None or len(aways) < 2 or q.shape[2] != 1:
        return {}
    try:
        return dict(zip(aways, gpu.launch(list(aways.values()), q[list(aways)][:, :, 0]), strict=True))
    except AwayFailed:  # each session tries by itself, and says what was wrong
        return {}


def _worth(view: SegmentView) -> bool:
    return view.visible >= SHARED_TOKENS_MIN


def _may_share(layer: Layer, prepared: Prepared, n: int) -> bool:
    """Whether one query, and no more, sees everything, with the views as they are stored."""
    return n == 1 and layer.reads_all(prepared, n) and not len(layer.run.overlaid)
