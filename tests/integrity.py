"""Every database that a test opens proves its integrity: before it is closed, and where it stays open, when the test is over."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from weakref import WeakSet

from kvdb.database import Database
from kvdb.errors import IntegrityError
from kvdb.session.asked import EndedSession
from kvdb.session.state import SessionState


class Watch:
    """The databases that are open, and what was wrong in one since `take_errors`."""

    def __init__(self) -> None:
        self._open: WeakSet[Database] = WeakSet()
        self._errors: list[IntegrityError] = []

    def opened(self, database: Database) -> None:
        self._open.add(database)

    def closes(self, database: Database) -> None:
        """A database is about to be closed."""
        if database in self._open:
            self._open.discard(database)
            self._check(database)

    def spare(self, database: Database) -> None:
        """Do not check a database that a test breaks on purpose."""
        self._open.discard(database)

    def take_errors(self) -> list[IntegrityError]:
        """What was wrong in databases that were closed, and is in those that are open."""
        for database in list(self._open):
            self._check(database)
        errors, self._errors = self._errors, []
        return errors

    def _check(self, database: Database) -> None:
        """Check a database, unless calls are under way: what they are about to own has no owner yet."""
        with ExitStack() as turns:
            handles = database.handles
            free = not handles._calls
            for handle in list(handles._handles):
                lock = handle.turns if isinstance(handle, (SessionState, EndedSession)) else handle._lock
                if lock.acquire(blocking=False):
                    turns.callback(lock.release)
                else:
                    free = False
            if free:
                try:
                    database.check_integrity()
                except IntegrityError as error:
                    self._errors.append(error)


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch every database that is opened while the body runs."""
    watch, begin, end = Watch(), Database.__init__, Database.close

    @wraps(begin)
    def opened(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        watch.opened(self)

    @wraps(end)
    def closed(self):
        watch.closes(self)
        end(self)

    Database.__init__, Database.close = opened, closed
    try:
        yield watch
    finally:
        Database.__init__, Database.close = begin, end
