"""What the optimizer sees of a query: numbers and names."""

from dataclasses import dataclass
from math import inf

from indexes.retrieval import Retrieval, TopK
from query_optimizer.wanted import NO_HINTS, Hints


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What earlier queries of one KV head showed, exponential averages over `queries` of them.

    retrieved: tokens that a range retrieved, of the query head that wanted most. dense: the share of queries that wanted so much
    that they were not answered by an index.
    """

    queries: float = 0.0
    retrieved: float = 0.0
    dense: float = 0.0


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """An index that stands over a part. seconds, nbytes: what a search by all KV heads is expected to take and to read.

    sharp_seconds: the same where nothing is known of the queries, and few tokens are wanted. tail_seconds: of a search for few
    with an estimate of the attention over all others, None where it cannot make one. kept: bytes that it keeps. walks: whether
    its search wanders from token to token, hidden ones too, so that its cost hardly grows with their number. ranks:
    whether the k largest are all that it can find.
    """

    kind: str
    seconds: float
    nbytes: float
    kept: int
    sharp_seconds: float
    walks: bool = False
    tail_seconds: float | None = None
    ranks: bool = False

    @property
    def estimates_tail(self) -> bool:
        """Whether it can estimate the attention over what it does not retrieve."""
        return self.tail_seconds is not None


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One place that holds tokens.

    visible: of `stored` tokens these count. seconds: what reading them takes. begin, end: tokens that an index may be asked for;
    the others belong to the window, or have none yet. heads: what is known of each KV head, () for nothing. building: kinds of
    index that are under way. shift: how far the part was moved from where it was computed. overlaid:
    visible tokens that were recomputed and stand in another part. sessions: open over it. fresh: whether these are the session's
    own tokens.
    """

    name: str
    visible: int
    stored: int
    tier: str
    seconds: float
    begin: int = 0
    end: int = 0
    indexes: tuple[IndexFacts, ...] = ()
    heads: tuple[HeadFacts, ...] = ()
    building: tuple[str, ...] = ()
    shift: int = 0
    overlaid: int = 0
    sessions: int = 1
    fresh: bool = False

    @property
    def searchable(self) -> int:
        """Tokens that an index may be asked for."""
        return self.end - self.begin

    @property
    def window_seconds(self) -> float:
        """What reading the tokens takes that no index is asked for."""
        return self.seconds * (self.visible - self.searchable) / max(self.visible, 1)


@dataclass(frozen=True, slots=True)
class FastMemory:
    """A tier that is faster than the one where tokens usually lie, what is free of it, and how fast pages are brought in."""

    tier: str
    free_nbytes: int
    transfer_bytes_s: float = inf


@dataclass(frozen=True, slots=True)
class Facts:
    """One call of one layer, of `layers`.

    new_tokens: how many of the last tokens ask. token_nbytes: K and V of one token, all KV heads. window_tokens: at least so many
    are always attended. call_seconds: what reading everything takes beside the reading; step_seconds: what a search takes beside
    the search and the reading. fast: memory that is faster than where the tokens lie, None for none. retrieval: what the caller
    asked for, None when the optimizer decides. bounded: whether a bound on the missed mass was asked for. estimate_tail: whether
    an estimate of what is not retrieved was.
    """

    layer: int
    layers: int
    parts: tuple[PartFacts, ...]
    new_tokens: int
    kv_heads: int
    group: int
    token_nbytes: int
    window_tokens: int
    call_seconds: float
    step_seconds: float
    fast: FastMemory | None = None
    retrieval: Retrieval | None = None
    bounded: bool = False
    estimate_tail: bool = False
    hints: Hints = NO_HINTS

    @property
    def tokens(self) -> int:
        return sum(part.visible for part in self.parts)

    @property
    def read_seconds(self) -> float:
        """What reading everything takes."""
        return self.call_seconds + sum(part.seconds for part in self.parts)

    def in_fast_memory(self, part: PartFacts) -> bool:
        """Whether its pages lie in that memory already."""
        return self.fast is not None and part.tier == self.fast.tier

    def affordable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """The indexes over a part that keep no more than the budget leaves."""
        budget = self.hints.memory_budget
        if budget is None:
            return part.indexes
        left = budget - self.window_tokens * self.token_nbytes
        return tuple(index for index in part.indexes if index.kept <= left)

    def usable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """Those of them that can find what is asked for, which is a range where nothing is named; and that estimate what they do
        not retrieve, where that is asked for and one can."""
        by_rank = isinstance(self.retrieval, TopK)
        usable = tuple(index for index in self.affordable(part) if by_rank or not index.ranks)
        if self.estimate_tail:
            return tuple(index for index in usable if index.estimates_tail) or usable
        return usable
