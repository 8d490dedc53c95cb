"""What one tenant may read of others: the contexts that they share with it, as OWNER/NAME."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from kvdb.database import Database
from kvdb.errors import Unsupported
from kvdb.server.tenancy.names import Names
from kvdb.session.state import SessionState
from kvdb.types import ContextInfo, PromptPart

MIXED = "\0others"
"""What the salt of a session ends with that stands on another tenant's context, also when it is forked. No lookup says so."""


class Laid(NamedTuple):
    """The parts of a session, by their names in the database. salts: of the contexts of others among them."""

    parts: list[PromptPart]
    salts: frozenset[str]


class SharedContexts:
    """The contexts that a tenant may read, its own and those that are shared with it. Thread-safe.

    A name is that of the tenant's own context where it has one of that name. What is not shared with it and what is not there are
    looked up alike: as an own context that is not there.
    """

    def __init__(self, database: Database, tenant: str, names: Names) -> None:
        self._database = database
        self._tenant = tenant
        self._names = names

    def inner(self, name: str) -> str:
        """The name in the database of a context that is to be read. Raises InvalidArgument for what is no name."""
        own = self._names.inner(name)
        shared, has = self._database.is_shared(name, self._tenant), self._database.has(own)
        return name if shared and not has else own

    def info(self, name: str) -> ContextInfo:
        """What is known of a context, as whoever reads it is told it: of another's neither notes nor use. Raises NotFound."""
        inner = self.inner(name)
        info = self._database.get(inner)
        if inner != name:
            return self._names.info(info)
        return replace(info, salt="", pinned=False, metadata={}, created=0.0, used=0.0, uses=0, shared_with=())

    def laid(self, parts: Iterable[PromptPart]) -> Laid:
        """The parts of a session that this tenant asks for. Raises NotFound or InvalidArgument."""
        placed, salts = [], set()
        for part in parts:
            if isinstance(part.source, str):
                inner = self.inner(part.source)
                if inner == part.source:
                    salts.add(self._database.get(inner).salt)
                part = replace(part, source=inner)  # noqa: PLW2901
            placed.append(part)
        return Laid(placed, frozenset(salts))


def mark(session: SessionState) -> None:
    """Note that a session stands on contexts of others."""
    session.salt += MIXED


def check_own(session: SessionState) -> None:
    """Raises Unsupported for a session that stands on contexts of others."""
    if session.salt.endswith(MIXED):
        raise Unsupported(
            "the session stands on a context that another tenant shares, so it cannot be stored; import what is yours"
        )
