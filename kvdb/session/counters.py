"""Counters of one session."""

from collections.abc import Sequence

import numpy as np

from kvdb.attention.exact import AttentionStats
from kvdb.session.audits import Audits
from kvdb.types import SessionStats
from query_optimizer.plan import Plan


class SessionCounters:
    """Sums over the queries of one session."""

    def __init__(self) -> None:
        self.queries = self.bytes_read = self.kernel_ns = 0
        self.tokens_seen = self.plan_ns = self.search_ns = self.gather_ns = 0
        self.tokens_scanned = self.tokens_retrieved = self.missed = self.missed_bound = self.missed_bound_max = 0.0
        self.rules: dict[str, int] = {}

    def count(self, plan: Plan, stats: AttentionStats, tokens: int, queries: int = 1) -> None:
        """Count calls that were answered by a plan. stats: of one call, or sums over `queries` of them, but for the largest
        bound. tokens: before the query, or the sum over the queries."""
        self.count_by(plan.rule, stats, tokens, queries)

    def count_by(self, rule: str, stats: AttentionStats, tokens: int, queries: int = 1) -> None:
        """`count` of a rule."""
        self.queries += queries
        self.tokens_seen += tokens
        self.search_ns += stats.search_ns
        self.gather_ns += stats.gather_ns
        self.tokens_scanned += stats.scanned
        self.tokens_retrieved += stats.retrieved
        self.bytes_read += stats.nbytes
        self.kernel_ns += stats.kernel_ns
        self.missed += stats.missed
        self.missed_bound += stats.missed_bound
        self.missed_bound_max = max(self.missed_bound_max, stats.missed_bound_max)
        self.rules[rule] = self.rules.get(rule, 0) + queries

    def add(self, other: "SessionCounters") -> None:
        """Add what another session counted."""
        for name, value in vars(other).items():
            if name == "rules":
                for rule, queries in list(value.items()):
                    self.rules[rule] = self.rules.get(rule, 0) + queries
            elif name == "missed_bound_max":
                self.missed_bound_max = max(self.missed_bound_max, value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def seconds(self) -> dict[str, float]:
        """The seconds of all calls by stage. What was neither search nor gathering is `attend`."""
        attend_ns = max(0, self.kernel_ns - self.search_ns - self.gather_ns)
        spent = {"plan": self.plan_ns, "search": self.search_ns, "gather": self.gather_ns, "attend": attend_ns}
        return {stage: ns / 1e9 for stage, ns in spent.items()}

    def stats(self, tokens: int, start: int, reused: int, tail_nbytes: int, audits: Sequence[Audits]) -> SessionStats:
        """The counters as statistics of a session. tokens: how many it holds, those from position `start` on in its tail. audits:
        of each layer, none under way."""
        errors = [error for layer in audits for error in layer.errors]
        ways: dict[str, int] = {}
        for layer in audits:
            for way, queries in layer.ways.items():
                ways[way] = ways.get(way, 0) + queries
        return SessionStats(
            tokens=tokens,
            reused=reused,
            tail_tokens=tokens - start,
            tail_nbytes=tail_nbytes,
            queries=self.queries,
            tokens_scanned=round(self.tokens_scanned),
            tokens_retrieved=round(self.tokens_retrieved),
            bytes_read=self.bytes_read,
            missed_mass=self.missed / max(self.queries, 1),
            missed_mass_bound=self.missed_bound / max(self.queries, 1),
            missed_mass_bound_max=self.missed_bound_max,
            kernel_seconds=self.kernel_ns / 1e9,
            rules=dict(self.rules),
            error_audits=sum(layer.audited for layer in audits),
            error_median=float(np.median(errors)) if errors else 0.0,
            error_p95=float(np.quantile(errors, 0.95, method="higher")) if errors else 0.0,
            error_max_seen=max([layer.largest for layer in audits]),
            ways=ways,
        )
