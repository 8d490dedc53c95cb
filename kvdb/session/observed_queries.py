"""Which queries of a layer go into the statistics of the segments that they search."""

from query_optimizer.query_options import QueryOptions

FIRST, EVERY = 16, 8
"""Statistics are made of the first queries of one token, and then of every 8th."""


class ObservedQueries:
    """Counts the queries of one layer that tell something. asked: how many there were."""

    def __init__(self) -> None:
        self.asked = 0

    def takes_next(self) -> bool:
        """Count one more query. Returns whether it is observed."""
        self.asked += 1
        return self.asked <= FIRST or self.asked % EVERY == 0

    def pass_by(self, n: int) -> None:
        """Count n queries that native code has observed by itself, or not."""
        self.asked += n


def tells(n: int, options: QueryOptions) -> bool:
    """Whether the search of n queries tells about them. Where the caller names the index, giving up says more about that."""
    return n == 1 and options.hints.index is None
