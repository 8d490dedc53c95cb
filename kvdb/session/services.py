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
from kvdb.types import ContextInfo, ModelSpec, Tokens


class StorableSession(Protocol):
    """What a session shows of itself to be stored. start: the position of the first token of its tails. reused: how many tokens
    before that were stored when it was opened."""

    spec: ModelSpec
    snapshot: Snapshot
    start: int
    reused: int

    @property
    def tails(self) -> list[BlockTable]: ...

    def ids(self, tokens: Tokens | None) -> Tokens: ...

    def query_samples(self) -> dict[int, Float32]: ...


class SessionPublisher(Protocol):
    """Makes contexts of sessions."""

    def store(self, session: StorableSession, name: str, tokens: Tokens | None, *, chunk: bool = False) -> ContextInfo:
        """Keep a session's tokens as a context; see `kvdb.ingest.publisher.Publisher.store`."""
        ...


@dataclass(frozen=True)
class SessionServices(PlanningServices):
    """Everything a session uses of its database. loader: brings segments back from disk. handles: what is open in the database.
    publisher: stores sessions. auditor: runs comparisons behind answers."""

    loader: Loader
    handles: OpenHandles
    publisher: SessionPublisher
    auditor: Executor
