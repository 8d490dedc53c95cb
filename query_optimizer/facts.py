"""The facts that the optimizer sees of a query: numbers and names."""

from dataclasses import dataclass
from math import inf

from indexes.retrieval import Exact, Retrieval, TopK
from query_optimizer.query_options import NO_OPTIONS, Hints, QueryOptions
from query_optimizer.ways import LayerBudget


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What earlier queries showed about one KV head: exponential averages over `queries` queries.

    retrieved_tokens: the number of tokens that a range retrieved, for the query head with the most. dense_share: the share of
    queries on which the search gave up, because reading everything cost less.
    """

    queries: float = 0.0
    retrieved_tokens: float = 0.0
    dense_share: float = 0.0


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """An index that stands over a part.

    seconds, nbytes: the expected time of a search by all KV heads, and the bytes it is expected to read. kept_nbytes: the memory
    of the index. sharp_seconds: the time of a search that needs few tokens, which is assumed where nothing is known about the
    queries. tail_seconds: the time of a search for few tokens that also estimates the attention over all others, None where the
    index cannot estimate. walks: whether a search follows links from token to token, hidden tokens too, so that its cost hardly
    grows with the number of tokens. ranks_only: whether it finds the k largest and nothing else.
    """

    kind: str
    seconds: float
    nbytes: float
    kept_nbytes: int
    sharp_seconds: float
    walks: bool = False
    tail_seconds: float | None = None
    ranks_only: bool = False

    @property
    def estimates_tail(self) -> bool:
        """Whether the index can estimate the attention over the tokens that it does not retrieve."""
        return self.tail_seconds is not None


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One place that holds tokens.

    visible: the number of its `stored` tokens that the queries may see. seconds: the time to read them. begin, end: the range of
    tokens that an index may search; the others belong to the window, or are in no index yet. heads: what is known about each KV
    head, () for nothing. building: kinds of index that are being built. shift: by how many positions the part was moved.
    overlaid: the number of visible tokens that were recomputed and stand in another part. sessions: the number of sessions open
    over it. is_tail: whether it holds the session's own tokens. token_nbytes: the bytes of one token's keys and values as they
    lie in it, None for those of the call. format: how they are quantized, "" where they are not. key_error, value_error: the
    relative errors of the keys and values that quantizing left, over all layers.
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
    is_tail: bool = False
    token_nbytes: int | None = None
    format: str = ""
    key_error: float = 0.0
    value_error: float = 0.0

    @property
    def searchable(self) -> int:
        """The number of tokens that an index may search."""
        return self.end - self.begin

    @property
    def window_seconds(self) -> float:
        """The time to read the tokens that no index searches."""
        return self.seconds * (self.visible - self.searchable) / max(self.visible, 1)


@dataclass(frozen=True, slots=True)
class FastMemory:
    """A tier that is faster than the one where tokens usually lie. free_nbytes: its free memory. transfer_bytes_s: how fast pages
    are copied to it."""

    tier: str
    free_nbytes: int
    transfer_bytes_s: float = inf


@dataclass(frozen=True, slots=True)
class Facts:
    """One call of one layer, of `layers`.

    new_tokens: the number of query tokens; they are the last tokens of the context. group: query heads for each KV head.
    token_nbytes: the bytes of one token's keys and values, of all KV heads. window_tokens: the number of tokens that are always
    attended. call_seconds: the time of a call that reads everything, without the reading. step_seconds: the time of a call that
    searches, without the searches and the reading. fast: memory that is faster than where the tokens lie, None where there is
    none. options: what the caller asked for, as it was handed in. budget: the error that the answer may have, None where the
    options say themselves what is read.
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
    options: QueryOptions = NO_OPTIONS
    budget: LayerBudget | None = None

    @property
    def retrieval(self) -> Retrieval | None:
        """The retrieval that the caller named, exact where the answer may have no error, None to let the optimizer decide."""
        return Exact() if self.options.error_max == 0 else self.options.retrieval

    @property
    def bounded(self) -> bool:
        """Whether the caller wants a bound on the missed softmax mass."""
        return self.options.max_missed_mass is not None

    @property
    def estimate_tail(self) -> bool:
        """Whether the caller wants an estimate of the attention over what is not retrieved."""
        return self.options.estimate_tail

    @property
    def hints(self) -> Hints:
        """The caller's hints."""
        return self.options.hints

    @property
    def tokens(self) -> int:
        """The number of tokens that the queries may see."""
        return sum(part.visible for part in self.parts)

    @property
    def read_seconds(self) -> float:
        """The time to read everything."""
        return self.call_seconds + sum(part.seconds for part in self.parts)

    def in_fast_memory(self, part: PartFacts) -> bool:
        """Whether the part already lies in the fast memory."""
        return self.fast is not None and part.tier == self.fast.tier

    def fits_fast_memory(self, part: PartFacts) -> bool:
        """Whether the part lies in the fast memory, or finds room there."""
        fits = self.fast is not None and part.visible * self.token_nbytes <= self.fast.free_nbytes
        return fits or self.in_fast_memory(part)

    def kept_in(self, part: PartFacts) -> str | None:
        """The fast tier, where the part does not lie in it and finds room."""
        if self.fast is None or self.in_fast_memory(part) or not self.fits_fast_memory(part):
            return None
        return self.fast.tier

    def affordable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """The indexes over a part that fit in the memory budget beside the window."""
        budget = self.hints.memory_budget
        if budget is None:
            return part.indexes
        left = budget - self.window_tokens * self.token_nbytes
        return tuple(index for index in part.indexes if index.kept_nbytes <= left)

    def usable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """The affordable indexes that can find what the caller named, or a range where the caller named nothing. Where the caller
        wants an estimate, these are only the indexes that can make one, if there are any."""
        by_rank = isinstance(self.retrieval, TopK)
        usable = tuple(index for index in self.affordable(part) if by_rank or not index.ranks_only)
        if self.estimate_tail:
            return tuple(index for index in usable if index.estimates_tail) or usable
        return usable
