"""One call on several sessions of one model: all of them take part or none, and views that they share are read once.

Steps of one token are one native call where no session needs Python (`_native.take_steps`): searches that ask one index for the
same are made as one, and blocks with which several runs begin are read once. What needs Python shares the views that it reads
whole (`kvdb.attention.shared_prefix`) and is searched one session after the other; so are calls of several tokens, which use what
they read many times over.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

import kvdb._native as _native
import kvdb.session.device_steps as device_steps
import kvdb.validate as validate
from kvdb.attention.device import DeviceFailed, Pending
from kvdb.attention.shared_prefix import exact_together, sharing_of
from kvdb.catalog.segment_view import SegmentView
from kvdb.planning.prepared import Prepared
from kvdb.session.device_steps import DeviceSteps
from kvdb.session.layer import Layer
from kvdb.session.state import SessionState
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, ModelSpec
from query_optimizer.query_options import QueryOptions

Starts = Sequence[int] | None

SHARED_TOKENS_MIN = 1024
"""Shorter views are not shared: they stay in the caches, and a merge costs as much as reading them again."""


class Member(NamedTuple):
    """A session in a call. options: what it is asked, with the session's own default."""

    session: SessionState
    layer: Layer
    options: QueryOptions


def attend(
    sessions: Sequence[SessionState], layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts = None
) -> Array:
    """`SessionState.attend` of each session, all or none: q and the result are `[sessions, q_heads, n, head_dim]`, k and v
    `[sessions, kv_heads, n, head_dim]`.

    starts: the position of each session's first token, as the caller believes. Raises what `attend` raises, then every session is
    as it was; InvalidArgument for a session that is given twice, SpecMismatch for sessions of several models.
    """
    with _turns(sessions):
        out = _native_steps(sessions, layer, q, k, v, options, starts)
        return _attend(sessions, layer, q, k, v, options, starts) if out is None else out


def step(
    sessions: Sequence[SessionState], layer: int, q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts = None
) -> Any | None:
    """`attend` of one token of each session on the GPU alone, where the arrays and all that the sessions hold lie there, and
    where the answer stays. None where more is needed, or anything is wrong; then nothing was done."""
    with _turns(sessions):
        alike = [session.native_steps(layer) for session in sessions if session.spec == sessions[0].spec]
        steps = [own for own in alike if isinstance(own, DeviceSteps)]
        if not steps or len(steps) < len(sessions):
            return None
        return device_steps.attend_together(steps, q, k, v, options, starts)


def attention(sessions: Sequence[SessionState], layer: int, q: Array, options: QueryOptions) -> Array:
    """`SessionState.attention` of each session; q and the result are `[sessions, q_heads, n, head_dim]`.

    Raises what `attention` raises, and what `attend` above does for the sessions.
    """
    with _members(sessions, layer, options) as members:
        validate.stacked("q", q, len(members))
        for i, (_, state, _) in enumerate(members):
            with validate.numbered(i):
                state.check_last(state.check_queries(q[i]))
        return _answer(sessions[0].spec, members, q)


def _native_steps(
    sessions: Sequence[SessionState], layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts
) -> Array | None:
    """`attend` by one call of native code. None where a session needs more, or anything is wrong; then nothing was done. Raises
    InvalidArgument for starts that cannot be."""
    spec, count = sessions[0].spec, len(sessions)
    alone = [session.native_steps(layer) for session in sessions if session.spec == spec]
    stacked = all(getattr(array, "shape", ())[:1] == (count,) for array in (q, k, v))
    ready = [steps for steps in alone if steps is not None]
    if not stacked or len(ready) < count:
        return None
    validate.starts(starts, count)
    out = np.empty((count, spec.q_heads, 1, spec.head_dim), spec.numpy_dtype)
    native = [steps.native for steps in ready]
    return out if _native.take_steps(native, q, k, v, options, starts, out, SHARED_TOKENS_MIN) else None


def _attend(
    sessions: Sequence[SessionState], layer: int, q: Array, k: Array, v: Array, options: QueryOptions, starts: Starts
) -> Array:
    """`attend` with Python's help."""
    with _members(sessions, layer, options) as members:
        spec = sessions[0].spec
        validate.starts(starts, len(members))
        for what, array in (("q", q), ("k", k), ("v", v)):
            validate.stacked(what, array, len(members))
        for i, (_, state, _) in enumerate(members):
            with validate.numbered(i):
                n = state.check_queries(q[i])
                validate.same_tokens(n, validate.keys_values(spec, k[i], v[i]))
                validate.start(None if starts is None else starts[i], state.run.tokens, layer)
                state.check_no_gaps()
        with _appended(members, k, v):
            out = _answer(spec, members, q)
        for _, state, _ in members:
            state.go_on(options)
        return out


@contextmanager
def _turns(sessions: Sequence[SessionState]) -> Iterator[None]:
    """Take the turns of all sessions while the body runs."""
    with ExitStack() as turns:
        for session in sorted(sessions, key=id):  # always in the same order, so that no two calls wait for each other
            turns.enter_context(session.turns)
        yield


@contextmanager
def _members(sessions: Sequence[SessionState], layer: int, options: QueryOptions) -> Iterator[list[Member]]:
    """Take the turns of all sessions while the body runs. Raises SpecMismatch, and what `SessionState.layer` and `Layer.resolve`
    raise."""
    with _turns(sessions):
        members = []
        for i, session in enumerate(sessions):
            with validate.numbered(i):
                validate.same_spec(session.spec, sessions[0].spec)
                state = session.layer(layer)
                members.append(Member(session, state, state.resolve(options)))
        yield members


@contextmanager
def _appended(members: Sequence[Member], k: Array, v: Array) -> Iterator[None]:
    """Append the tokens of all sessions, or of none if one session's tokens are refused or the body raises. Raises NonFiniteError
    or CapacityError."""
    with ExitStack() as undo:
        for i, (session, layer, _) in enumerate(members):
            with validate.numbered(i):
                session.append(layer, k[i], v[i])
            undo.callback(layer.take_back, k.shape[2])
        yield
        undo.pop_all()


def _answer(spec: ModelSpec, members: Sequence[Member], q: Array) -> Array:
    if not q.shape[2]:
        return np.empty(q.shape, q.dtype)
    prepared = [layer.prepare(q[i], options) for i, (_, layer, options) in enumerate(members)]
    launched = _launched(members, prepared, q)
    out = np.empty(q.shape, q.dtype)
    exact = [i for i, (_, layer, _) in enumerate(members) if _may_share(layer, prepared[i], q.shape[2])]
    sharing = sharing_of([members[i].session.snapshot.views for i in exact], _is_long)
    together = exact if sharing.groups else []
    if together:
        runs = [members[i].layer.run for i in together]
        layout = members[0].layer.tail.layout
        with pinned([page for i in together for page in members[i].layer.pages]):
            rows, all_stats = exact_together(layout, runs, sharing, q[together][:, :, 0], spec.softmax_scale)
        out[together] = rows[:, :, None]
        for i, stats in zip(together, all_stats, strict=True):
            members[i].layer.answered_exactly(prepared[i], q[i], out[i], stats, members[i].options)
            members[i].session.counters.count(prepared[i].plan, stats, members[i].layer.run.tokens)
    for i in sorted({*range(len(members))} - {*together}):
        out[i], stats = members[i].layer.answer_prepared(prepared[i], q[i], members[i].options, launched.get(i))
        members[i].session.counters.count(prepared[i].plan, stats, members[i].layer.run.tokens)
    return out


def _launched(members: Sequence[Member], prepared: Sequence[Prepared], q: Array) -> dict[int, Pending]:
    """The answers of the GPU that are under way, by the numbers of their sessions; launched together, before the CPU begins."""
    by_device = {i: plan.partition.device for i, plan in enumerate(prepared) if plan.partition.device is not None}
    gpu = members[0].layer.planner.gpu
    if gpu is None or len(by_device) < 2 or q.shape[2] != 1:
        return {}
    try:
        return dict(zip(by_device, gpu.launch(list(by_device.values()), q[list(by_device)][:, :, 0]), strict=True))
    except DeviceFailed:  # each session tries by itself, and logs what was wrong
        return {}


def _is_long(view: SegmentView) -> bool:
    return view.visible >= SHARED_TOKENS_MIN


def _may_share(layer: Layer, prepared: Prepared, n: int) -> bool:
    """Whether the call is one query that reads everything on the CPU, with the views as they are stored."""
    return n == 1 and layer.reads_all(prepared, n) and not len(layer.run.overlaid)
