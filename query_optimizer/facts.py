"""The facts that the optimizer sees of a query: numbers and names."""

from dataclasses import dataclass
from math import inf

from indexes.retrieval import Retrieval, TopK
    options: QueryOptions = NO_OPTIONS
    budget: LayerBudget | None = None

    @property
    def retrieval(self) -> Retrieval | None:
        """The retrieval that the caller named, None to let the optimizer decide."""
        return self.options.retrieval

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
        """Whether the part lies in that memory already."""
        return self.fast is not None and part.tier == self.fast.tier

    def affordable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """The indexes over a part that fit in the memory budget beside the window."""
        budget = self.hints.memory_budget
        if budget is None:
            return part.indexes
        left = budget - self.window_tokens * self.token_nbytes
        return tuple(index for index in part.indexes if index.kept_nbytes <= left)

    def usable(self, part: PartFacts) -> tuple[IndexFacts, ...]:
        """The affordable indexes that can find what is named, a range where nothing is; where the caller wants an estimate, only
        those that make one, if there are any."""
        by_rank = isinstance(self.retrieval, TopK)
        usable = tuple(index for index in self.affordable(part) if by_rank or not index.ranks_only)
        if self.estimate_tail:
            return tuple(index for index in usable if index.estimates_tail) or usable
        return usable
