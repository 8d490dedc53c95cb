"""How often a segment is opened and asked: what tells whether an index over it would pay."""

from dataclasses import dataclass
from threading import Lock


@dataclass
class Asked:
    """Queries of one segment, each a call on one layer, and the seconds that its share of them took.

    searches, attended: those that an index answered, and the shares of the tokens that they attended, summed. whole_seconds,
    whole_tokens: of those that read everything.
    """

    queries: int = 0
    seconds: float = 0.0
    searches: int = 0
    attended: float = 0.0
    whole_seconds: float = 0.0
    whole_tokens: int = 0

    def add(self, other: "Asked") -> None:
        self.queries += other.queries
        self.seconds += other.seconds
        self.searches += other.searches
        self.attended += other.attended
        self.whole_seconds += other.whole_seconds
        self.whole_tokens += other.whole_tokens


class Use:
    """What happened to one segment since it was stored. Thread-safe.

    opened: sessions over it so far; sessions: those that are open. now: the queries asked since its indexes last changed.
    queries_in_all: since it was stored. whole_token_seconds: what reading one token of a layer takes, by the last queries that
    read everything; None before there are.
    """

    def __init__(self) -> None:
        self.opened = self.queries_in_all = self.sessions = 0
        self.now = Asked()
        self.whole_token_seconds: float | None = None
        self._version = self._looked = 0
        self._lock = Lock()

    def open(self) -> int:
        """Another session; how many there were with it."""
        with self._lock:
            self.opened += 1
            return self.opened

    def hold(self, sessions: int) -> None:
        """So many more sessions are open, or less."""
        with self._lock:
            self.sessions += sessions

    def add(self, asked: Asked, version: int, every: int) -> bool:
        """Count queries that were answered with that version of the indexes; whether it is time to look at the segment, which it
        is when `every` so many, and a sixteenth, more were asked."""
        with self._lock:
            if version != self._version:  # what they took before says nothing of what would be saved now
                self._version, self.now = version, Asked()
            self.now.add(asked)
            self.queries_in_all += asked.queries
            if asked.whole_tokens:
                self.whole_token_seconds = asked.whole_seconds / asked.whole_tokens
            if self.queries_in_all - self._looked < max(every, self._looked // 16):
                return False
            self._looked = self.queries_in_all
            return True
