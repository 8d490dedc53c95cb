"""The services of a database that its sessions use."""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from indexes.base import Float32
from kvdb.catalog.snapshot import Snapshot
from kvdb.planning.services import PlanningServices
from kvdb.session.open_handles import OpenHandles
from kvdb.storage.block_table import BlockTable
from kvdb.storage.loader import Loader
from kvdb.types import DEFAULT_RETENTION, ContextInfo, ModelSpec, Retention, Tokens


class StorableSession(Protocol):
    """The parts of a session that are needed to store it. start: the position of the first token of its tails. reused: the number
    of tokens before it that were stored when it was opened."""

    spec: ModelSpec
    snapshot: Snapshot
    start: int
    reused: int
    salt: str

    @property
    def tails(self) -> list[BlockTable]: ...

    def ids(self, tokens: Tokens | None) -> Tokens: ...

    def query_samples(self) -> dict[int, Float32]: ...


class SessionPublisher(Protocol):
    """Makes contexts of sessions."""

    def store(
        self,
        session: StorableSession,
        name: str,
        tokens: Tokens | None,
        *,
        chunk: bool = False,
        retention: Retention = DEFAULT_RETENTION,
    ) -> ContextInfo:
        """Keep a session's tokens as a context; see `kvdb.ingest.publisher.Publisher.store`."""
        ...


@dataclass(frozen=True)
class SessionServices(PlanningServices):
    """Everything that a session uses from its database. loader: brings segments back from disk. handles: the open sessions and
    imports of the database. publisher: stores sessions. auditor: compares answers with exact attention, after they were given."""

    loader: Loader
    handles: OpenHandles
    publisher: SessionPublisher
    auditor: Executor
