"""What a call on sessions asks of the engine, as the queue at its door counts it."""

from kvdb.events import origin
from kvdb.server.admission.fair_queue import Work
from kvdb.session.state import SessionState


def work_on(session: SessionState | None, layer: int, tokens: int, due: float = float("inf")) -> Work:
    """Work on one layer of a session, or of several like it. tokens: those that are asked about or appended, over all sessions.

    Calls on one layer of sessions that begin with the same stored segment are a group: they read the same.
    """
    views = () if session is None else session.views
    group = (id(views[0].segment), layer) if views else None
    return Work(origin().tenant, max(1, tokens), group, due)
