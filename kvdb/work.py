"""What a session has done so far."""

from kvdb.attention.execute import Reading
from query_optimizer.plan import Plan


class Work:
    """Sums over the queries of one session."""

    def __init__(self) -> None:
        self.queries = self.bytes_read = self.kernel_ns = 0
        self.tokens_scanned = self.tokens_retrieved = self.missed = self.missed_bound = self.missed_bound_max = 0.0
        self.rules: dict[str, int] = {}

    def count(self, plan: Plan, reading: Reading) -> None:
        self.queries += 1
        self.tokens_scanned += reading.scanned
        self.tokens_retrieved += reading.retrieved
        self.bytes_read += reading.nbytes
        self.kernel_ns += reading.kernel_ns
        self.missed += reading.missed
        self.missed_bound += reading.missed_bound
        self.missed_bound_max = max(self.missed_bound_max, reading.missed_bound_max)
        self.rules[plan.rule] = self.rules.get(plan.rule, 0) + 1
