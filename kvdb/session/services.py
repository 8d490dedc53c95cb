"""The services of a database that its sessions use."""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from indexes.base import Float32
from kvdb.catalog.compaction.holders import Holder
from kvdb.catalog.evidence.habits import Habits
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.catalog.segments.states import StateSnapshot
from kvdb.events import Events
from kvdb.indexing.background_time import BackgroundTime
from kvdb.planning.services import PlanningServices
from kvdb.session.activity import SessionActivity
from kvdb.session.asked import EndedSession
from kvdb.session.open_handles import OpenHandles
from kvdb.storage.block_table import BlockTable
from kvdb.storage.loader import Loader
from kvdb.types import DEFAULT_RETENTION, ContextInfo, ModelSpec, Retention, Tokens


class StoredStates(Protocol):
    """The states of a session that are stored with it, `kvdb.session.states.SessionStates`."""

    def snapshots(self) -> dict[int, StateSnapshot]: ...


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

    @property
    def states(self) -> StoredStates: ...


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


class SpaceKeeper(Protocol):
    """Has open sessions stand on fewer blocks where stored segments are laid out anew."""

    def hold(self, session: Holder) -> None:
        """A session over a prefix stands on other segments than before, whose references it holds."""
        ...

    def let_go(self, session: Holder) -> bool:
        """A session is about to give its segments back. Returns whether `settle` is worth while then."""
        ...

    def settle(self) -> None:
        """Give back what nobody needs any more."""
        ...

    def catch_up(self, session: Holder) -> None:
        """Have a session go over to what it was not free for before. The caller has its turn."""
        ...


class Prover(Protocol):
    """Makes proofs of what ended sessions asked: `kvdb.session.late_proofs`."""

    def add(self, services: "SessionServices", ended: EndedSession) -> None: ...


@dataclass(frozen=True)
class SessionServices(PlanningServices):
    """Everything that a session uses from its database. loader: brings segments back from disk. handles: the open sessions and
    imports of the database. publisher: stores sessions. space: lays out anew what they stand on. auditor: compares answers with
    exact attention, after they were given. prover: compares what ended sessions asked. background_time: what all that may take,
    and builds. habits: what ways of answering erred, over all contexts of a model. activity: sums over all sessions. events: told
    when sessions come and go."""

    loader: Loader
    handles: OpenHandles
    publisher: SessionPublisher
    space: SpaceKeeper
    auditor: Executor
    prover: Prover
    background_time: BackgroundTime
    habits: Habits
    activity: SessionActivity
    events: Events
