"""A rule that tells what the optimizer was asked for."""

from kvdb.config import ERROR_MAX
from query_optimizer.query_options import QueryOptions


class Witness:
    """A rule that is asked first, never fires, and keeps the options of every query."""

    name, before = "witness", "exact_asked"

    def __init__(self):
        self.seen = []

    def when(self, facts, _part, _heads):
        self.seen.append(facts.options)
        return "it only looks on"

    def saw(self, options: QueryOptions):
        """Whether there were queries, and all of them asked for this, with the database's error_max where they name none. Forgets
        them."""
        seen, self.seen = self.seen, []
        asked = options.with_default(ERROR_MAX)
        return bool(seen) and all(one == asked for one in seen)
