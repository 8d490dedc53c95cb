"""What the web console shows, as plain values for JSON. Everything is a function of a database and changes nothing in it."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kvdb.errors import InvalidArgument, NotFound, SessionClosed, Unsupported
from kvdb.server.metrics.calls import CallMetrics
from kvdb.server.tenancy.tenants import AnyDatabase
from kvdb.server.tiers import tier_uses
from kvdb.session.state import SessionState
from kvdb.types import ERROR, MEASURES, ContextInfo, ModelSpec
from kvdb.types.measures import is_known, overall
from kvdb.version import __version__
from query_optimizer.access import Access
from query_optimizer.explain import ranges
from query_optimizer.plan import Plan
from query_optimizer.query_options import NO_OPTIONS

Json = dict[str, Any]

PAGE_MAX = 100
"""The most contexts of an answer."""
VIEWS_MAX = 200
"""The most segments of a context in a list; a context by itself is told with all of them, up to ALL_VIEWS_MAX."""
ALL_VIEWS_MAX = 5000
SESSIONS_MAX = 200
"""The most sessions of an answer, the latest."""
DIGITS = 6
"""Digits of a number that colours a cell."""
HEAT = (*MEASURES, ERROR)


def overview(database: AnyDatabase) -> Json:
    """What the whole database holds: tiers in bytes, with their limits, and how many contexts and sessions there are."""
    return {
        "version": __version__,
        "contexts": database.count_contexts(),
        "sessions": database.count_sessions(),
        "tiers": [tier._asdict() for tier in tier_uses(database)],
    }


def contexts(database: AnyDatabase, prefix: str = "", after: str = "", limit: int = 50) -> Json:
    """A page of contexts in the order of their names, with their segments. next: the name to go on behind, None at the end.
    Raises InvalidArgument for a limit that is not 1 to PAGE_MAX."""
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidArgument(f"limit is {limit}; expected 1 to {PAGE_MAX}")
    found = database.contexts(prefix, limit + 1, after)
    page, told = found[:limit], []
    for info in page:
        with suppress(NotFound):  # it was dropped meanwhile
            told.append(_summary(info) | {"views": _views(database, info.name, VIEWS_MAX)})
    return {"contexts": told, "next": page[-1].name if len(found) > limit else None}


def context(database: AnyDatabase, name: str) -> Json:
    """One context: its model, segments, indexes, and which of its measures are known. Raises NotFound."""
    info, statistics = database.get(name), database.statistics(name)
    return _summary(info) | {
        "views": _views(database, name, ALL_VIEWS_MAX),
        "indexes": [asdict(index) for index in database.indexes(name)],
        "measures": [measure for measure in HEAT if is_known(statistics, measure)],
        "metadata": {key: str(value) for key, value in info.metadata.items()},
        "expires": info.expires,
        "key_error": info.key_error,
        "value_error": info.value_error,
    }


def heat(database: AnyDatabase, name: str, measure: str) -> Json:
    """A measure of the queries over a context, `[layers][q_heads]`, NaN where it is not known. queries: the most of any head.
    Raises NotFound, and InvalidArgument for a measure that does not exist."""
    if measure not in HEAT:
        raise InvalidArgument(f"measure is {measure!r}; expected one of {', '.join(HEAT)}")
    statistics = database.statistics(name)
    counts = [segment.audits if measure == ERROR else segment.queries for segment in statistics.segments]
    values = overall(statistics, measure).tolist()
    cells = [[float(f"{value:.{DIGITS}g}") for value in row] for row in values]
    return {"measure": measure, "values": cells, "queries": max((int(count.max()) for count in counts), default=0)}


def sessions(database: AnyDatabase) -> Json:
    """The open sessions, the latest first, and how many there are."""
    found, told = database.open_sessions(), []
    for session in found[::-1][:SESSIONS_MAX]:
        with suppress(SessionClosed):  # meanwhile
            told.append(_session(session))
    return {"sessions": told, "total": len(found)}


def calls(measured: CallMetrics | None) -> Json:
    """Calls since the start: how many ended with each status, and `[seconds, how many took at most that]` of steps and of other
    calls, where None stands for any time. Nothing for whoever may not know."""
    if measured is None:
        return {}
    codes, latencies = measured.totals()
    return {"codes": codes, "latencies": {kind: list(counts.items()) for kind, counts in latencies.items()}}


def explain(database: AnyDatabase, name: str, layer: int, analyze: bool) -> Json:
    """The plan of one more query of a layer over a context, as a tree and as text. analyze: whether to carry it out, for a query
    that was kept when the context was stored.

    Raises NotFound, LayerError, InvalidArgument, and Unsupported for a context on disk, which would have to be brought back.
    """
    if not database.get(name).resident:
        raise Unsupported("this context is on disk, and the console brings nothing back; open a session, or use kvdb explain")
    return _plan(database.explain(name, layer, NO_OPTIONS, analyze)[0])


def explain_session(database: AnyDatabase, name: str, layer: int, analyze: bool) -> Json:
    """The plan of the next query of the session of that `SessionState.name`, as `explain`. Raises NotFound, LayerError,
    InvalidArgument or SessionClosed."""
    session = next((session for session in database.open_sessions() if session.name == name), None)
    if session is None:
        raise NotFound(f"no open session has the id {name!r}; it was closed")
    return _plan(session.explain(layer, NO_OPTIONS, analyze))


def _summary(info: ContextInfo) -> Json:
    return {
        "name": info.name,
        "tokens": info.tokens,
        "segments": info.segments,
        "nbytes": info.nbytes,
        "model": _model(info.spec),
        "kind": "prefix" if info.exact else "blend" if info.blended else "chunk",
        "resident": info.resident,
        "pinned": info.pinned,
        "format": info.format,
        "created": info.created,
        "used": info.used,
        "uses": info.uses,
    }


def _views(database: AnyDatabase, name: str, most: int) -> list[Json]:
    return [asdict(view) for view in database.views(name)[:most]]


def _model(spec: ModelSpec) -> Json:
    return {
        "name": spec.name,
        "layers": spec.layers,
        "q_heads": spec.q_heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "shapes": "" if spec.uniform else spec.shapes,
        "dtype": spec.dtype,
    }


def _session(session: SessionState) -> Json:
    """retrieved: the share of the tokens looked at that was attended, None before the first query. Raises SessionClosed."""
    stats = session.stats()
    scanned = stats.tokens_scanned
    return {
        "id": session.name,
        "tenant": session.tenant,
        "label": session.label,
        "opened": session.opened,
        "model": _model(session.spec),
        "tokens": stats.tokens,
        "reused": stats.reused,
        "tail": stats.tail_tokens,
        "nbytes": stats.tail_nbytes,
        "queries": stats.queries,
        "retrieved": stats.tokens_retrieved / scanned if scanned else None,
        "missed_bound": stats.missed_mass_bound if stats.queries else None,
        "seconds": stats.kernel_seconds,
        "rules": dict(stats.rules),
    }


def _plan(plan: Plan) -> Json:
    return {
        "layer": plan.layer,
        "retrieval": str(plan.retrieval),
        "chosen": not plan.retrieval_given,
        "estimate": asdict(plan.estimate),
        "actual": None if plan.actual is None else asdict(plan.actual),
        "outcome": None if plan.outcome is None else asdict(plan.outcome),
        "accesses": [_access(access) for access in plan.accesses],
        "wishes": [{"part": part, "index": kind} for part, kind in plan.wishes],
        "notes": list(plan.notes),
        "text": plan.explain(verbose=True),
    }


def _access(access: Access) -> Json:
    return {
        "part": access.part,
        "begin": access.begin,
        "end": access.end,
        "index": access.index,
        "retrieval": None if access.index is None else str(access.retrieval),
        "heads": None if access.all_heads else f"{ranges(access.heads)} of {access.kv_heads}",
        "tier": access.tier,
        "format": access.format,
        "rule": access.rule,
        "reason": access.reason,
        "refusals": [asdict(refusal) for refusal in access.refusals],
        "estimate": asdict(access.estimate),
        "actual": None if access.actual is None else asdict(access.actual),
    }
