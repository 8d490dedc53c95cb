"""What ended sessions asked, kept to be asked again."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock

from kvdb.catalog.segments.segment_view import Views
from kvdb.session.query_samples import QuerySamples
from kvdb.session.terms import SessionTerms
from kvdb.storage.block_table import BlockTable
from kvdb.types import ModelSpec
from query_optimizer.query_options import QueryOptions


@dataclass(frozen=True)
class Asked:
    """Queries of a layer. options: with which they were asked, an error_max among them. tail: what the session had added."""

    queries: QuerySamples
    options: QueryOptions
    tail: BlockTable

    def release(self) -> None:
        """Give everything back. Twice does nothing."""
        self.queries.release()
        self.tail.release()


class EndedSession:
    """What a session asked that has ended, by layer, which it owns. stood_on: the stored tokens, which may go meanwhile.
    turns: held while a layer is asked again."""

    def __init__(self, spec: ModelSpec, stood_on: Views, terms: SessionTerms, asked: Mapping[int, Asked]) -> None:
        self.spec = spec
        self.stood_on = stood_on
        self.terms = terms
        self.asked = dict(asked)
        self.turns = RLock()

    @property
    def views(self) -> Views:
        """No segment is held."""
        return ()

    def own_tables(self) -> list[BlockTable]:
        """The tails."""
        return [asked.tail for asked in list(self.asked.values())]

    def close(self) -> None:
        """Give everything back. Closing twice does nothing."""
        while self.asked:
            self.asked.popitem()[1].release()
