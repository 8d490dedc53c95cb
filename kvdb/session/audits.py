"""Audits of one layer of a session: exact answers, compared with the answers of other ways.

A way that is not proven runs in the shadow of answers that are exact anyway; a way in use is audited by reading some KV heads
whole now and then. The comparison follows the answer: another thread makes it, until the layer is used again.
"""

import logging
from concurrent.futures import Executor, Future

import numpy as np

from kvdb.attention.device import DeviceFailed
from kvdb.attention.exact import AttentionStats
from kvdb.attention.signs import SIGNS, outside
from kvdb.catalog.way_record import Audit
from kvdb.errors import KvdbError
from kvdb.planning.budget import refreshed
from kvdb.planning.planner import Planner
from kvdb.planning.prepared import Prepared, Variant
from kvdb.session.answer_errors import given_up_heads, head_errors, largest_missed
from kvdb.session.comparison import Comparison, Execute
from kvdb.types import Array, Float32
from query_optimizer.error_budget import trial_of
from query_optimizer.head_shares import TIME_SHARE_GUESS
from query_optimizer.query_options import QueryOptions
from query_optimizer.rule import Heads, piecewise_cost
from query_optimizer.ways import LayerBudget, WayFacts

log = logging.getLogger(__name__)

SHADOW_SHARE = 0.10
"""The share of time that ways without proof may take, relative to the exact answers in whose shadow they run."""
AUDIT_SHARE = 0.05
"""The share of time that audits of ways in use may take, relative to all answers."""
AUDITS_AT_FIRST = 2.0
"""A session may audit this many queries from its first steps on, because they may ask for something new."""
AUDIT_QUERIES = 32
"""The number of queries between two audits, if there is time for one; with more time, more heads are audited at once."""
ERRORS_MAX = 1024
"""The number of errors that are kept for the statistics of the session."""
LOOK_QUERIES = 32
"""A layer that compares nothing looks after this number of queries whether there is something to try now."""
TRIAL_QUERIES = 7
"""The number of queries after which a layer looks again whether there is time for a comparison that is due."""
IDLE_QUERIES_MAX = 1 << 20
TIME_SHARE_MIN = 0.01
"""The least assumed time of a search, relative to an exact answer."""


class Audits:
    """Decides which answers are compared, compares them, and tells the evidence.

    errors: estimates of the layer's relative error from audits of ways in use, the last ERRORS_MAX. audited, largest: how many
    there were, and the largest. ways: how many queries each way answered, for some head. planner: that of the layer. The owner
    calls `settle` before each use of the layer, because the executor compares in another thread.
    """

    def __init__(self, layer: int, planner: Planner, executor: Executor) -> None:
        self.errors: list[float] = []
        self.audited, self.largest = 0, 0.0
        self.ways: dict[str, int] = {}
        self._layer = layer
        self.planner = planner
        self._executor = executor
        self._running: Future[None] | None = None
        self._exact_ns = 0.0
        self._shadow_ns = 0.0
        self._answer_ns = 0.0
        self._audit_ns = 0.0
        self._whole_ns = 0.0
        self._since = AUDIT_QUERIES
        self._suspects: tuple[int, ...] = ()
        self._next_head = 0
        self._looked_at: LayerBudget | None = None
        self._looked_for = 0
        self._trial: tuple[WayFacts, Heads] | None = None

    def due(self, prepared: Prepared, n: int, options: QueryOptions, *, alone: bool = True) -> Comparison | None:
        """What the answer to n queries is to be compared with, None for nothing. alone: whether the served plan may be another
        than the prepared one."""
        budget = prepared.budget
        if budget is None or not prepared.learns:
            return None
        for evidence in prepared.evidence:
            evidence.count_queries(self._layer, n)
        searched = prepared.searched_heads
        heads = self._heads_due(searched, self._exact_call_ns(budget)) if alone and prepared.searches else ()
        if heads:
            served = self.planner.prepare(n, options, Variant(whole=heads))
            return Comparison(served, prepared, heads, in_use=True)
        trial = self._affordable_trial(budget, prepared, alone=alone)
        if trial is None:
            return None
        facts, compared = trial
        shadow = self.planner.prepare(n, options, Variant(trial=facts.way))
        if not shadow.searches:
            return None
        extra = _served(budget, compared)
        served = self.planner.prepare(n, options, Variant(whole=searched)) if extra else prepared
        return Comparison(served, shadow, compared, in_use=False, extra=extra)

    def unlike(self, prepared: Prepared, stats: AttentionStats) -> Comparison | None:
        """What an answer by a plan is to be compared with because heads were read whole for a query that is unlike those for
        which their ways were proven; None where none were. stats: of the answer."""
        if stats.unlike is None or not prepared.learns:
            return None
        return Comparison(prepared, prepared, tuple(np.flatnonzero(stats.unlike).tolist()), in_use=True, unlike=True)

    def answered(
        self,
        prepared: Prepared,
        comparison: Comparison | None,
        q: Array,
        out: Array,
        stats: AttentionStats,
        options: QueryOptions,
        execute: Execute,
    ) -> None:
        """Count an answer `[q_heads, n, head_dim]` to queries q, and begin the comparison that was due. prepared: the plan by
        which such queries are served. execute: answers queries of the layer by another plan."""
        budget = prepared.budget
        if budget is None:
            return
        served = prepared if comparison is None else comparison.served
        for way in served.ways:
            self.ways[way] = self.ways.get(way, 0) + 1
        exact_ns = float(stats.kernel_ns)
        if served.searches:
            self._answer_ns += stats.kernel_ns
            self._since += 1
            exact_ns = self._exact_call_ns(budget)
        elif comparison is not None and comparison.extra:
            self._shadow_ns += stats.kernel_ns
            self._whole_ns = stats.kernel_ns
        else:
            self._exact_ns += stats.kernel_ns
            self._whole_ns = stats.kernel_ns
        if comparison is None:
            return
        given = comparison, q.copy(), out.copy(), exact_ns, options, execute
        if comparison.shadow.partition.device is not None:
            self._compare(*given)  # a device answers one thread at a time
        else:
            self._running = self._executor.submit(self._compare, *given)

    def idle_steps(self, prepared: Prepared) -> int:
        """How many queries may be answered by a plan before it is time to look whether one of them is to be compared."""
        budget = prepared.budget
        if budget is None or not prepared.learns or not budget.ways:  # the plan ends when there is a first way
            return IDLE_QUERIES_MAX
        if self._suspects:
            return 0
        nothing_to_try = self._trial is None and self._looked_at is budget
        trial = LOOK_QUERIES - self._looked_for if nothing_to_try else TRIAL_QUERIES
        audit = AUDIT_QUERIES - self._since if prepared.searches else LOOK_QUERIES
        return min(trial, audit if audit > 0 else TRIAL_QUERIES)

    def follow(self, prepared: Prepared, stats: AttentionStats, queries: int) -> None:
        """Count queries that were answered by a plan and compared with nothing. stats: sums over them."""
        if prepared.budget is None:
            return
        if prepared.learns:
            for evidence in prepared.evidence:
                evidence.count_queries(self._layer, queries)
        for way in prepared.ways:
            self.ways[way] = self.ways.get(way, 0) + queries
        if self._looked_at is prepared.budget:
            self._looked_for += queries
        if prepared.searches:
            self._answer_ns += stats.kernel_ns
            self._since += queries
        else:
            self._exact_ns += stats.kernel_ns
            self._whole_ns = stats.kernel_ns / queries

    def settle(self) -> None:
        """Wait for the comparison under way: it reads what the next call may change."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _affordable_trial(self, budget: LayerBudget, prepared: Prepared, *, alone: bool) -> tuple[WayFacts, Heads] | None:
        """The way to try now, and for which KV heads; None for none, or where there is no time for it. For heads that are
        searched, an exact answer has to be made too, which takes a plan of its own."""
        if not budget.ways or not self._may_try(budget, 0.0):
            return None
        trial = self._trial_of(budget, prepared)
        if trial is None:
            return None
        facts, heads = trial
        extra = _served(budget, heads)
        share = (TIME_SHARE_GUESS if facts.time_share is None else facts.time_share) + extra
        possible = (alone or not extra) and self._may_try(budget, share, first=not extra)
        return trial if possible else None

    def _trial_of(self, budget: LayerBudget, prepared: Prepared) -> tuple[WayFacts, Heads] | None:
        """The way to try next, and for which KV heads. It stays the same until an audit or another plan tells more, or other
        sessions may have."""
        if self._looked_at is not budget or self._looked_for >= LOOK_QUERIES:
            self._trial = trial_of(refreshed(budget, prepared.evidence, self._layer))
            self._looked_at, self._looked_for = budget, 0
        self._looked_for += 1
        return self._trial

    def _may_try(self, budget: LayerBudget, time_share: float, *, first: bool = True) -> bool:
        """Whether there is time for one more answer by a way that takes this share of an exact one. first: for the first of the
        session there is."""
        expected = time_share * self._exact_call_ns(budget)
        return (first and not self._shadow_ns) or self._shadow_ns + expected <= SHADOW_SHARE * (self._exact_ns + self._answer_ns)

    def _exact_call_ns(self, budget: LayerBudget) -> float:
        """What an exact answer takes: the last one, or what is expected."""
        return self._whole_ns or 1e9 * budget.read_seconds

    def _heads_due(self, searched: tuple[int, ...], whole_ns: float) -> tuple[int, ...]:
        """The KV heads in use that are to be read whole for an audit now."""
        suspects = tuple(head for head in self._suspects if head in searched)
        self._suspects = ()
        if suspects:
            return suspects
        if self._since < AUDIT_QUERIES:
            return ()
        spendable = AUDIT_SHARE * self._answer_ns + AUDITS_AT_FIRST * whole_ns - self._audit_ns
        count = len(searched)
        while count and piecewise_cost(count / len(searched)) * whole_ns > spendable:
            count -= 1
        if not count:
            return ()
        self._since = 0
        self._audit_ns += piecewise_cost(count / len(searched)) * whole_ns
        first = self._next_head % len(searched)
        self._next_head += count
        turned = searched[first:] + searched[:first]
        return tuple(sorted(turned[:count]))

    def _compare(
        self, comparison: Comparison, q: Array, exact: Array, exact_ns: float, options: QueryOptions, execute: Execute
    ) -> None:
        shadow = comparison.shadow
        budget = shadow.budget
        assert budget is not None
        self._looked_at = None
        try:
            state, stats = execute(shadow, q, options, q.shape[1] == 1, judged=False)
        except (KvdbError, DeviceFailed) as failure:
            log.warning("an audit of layer %d failed: %s", self._layer, failure)
            return
        kv_heads = len(budget.heads)
        errors = head_errors(state.out, exact, kv_heads)
        missed = largest_missed(stats, errors.shape)
        signs = np.full((SIGNS, *q.shape[:2]), np.nan, np.float32) if stats.signs is None else stats.signs
        mask = np.zeros(kv_heads, np.bool_)
        mask[list(comparison.heads)] = True
        if not comparison.in_use:
            self._shadow_ns += stats.kernel_ns
        given_up = given_up_heads(stats, kv_heads)
        timed = not comparison.in_use and not given_up.all()
        limits = np.array([share.error_max for share in budget.heads])
        ways = [budget.way_of(head) for head in range(kv_heads)]
        suspects = np.zeros(kv_heads, np.bool_)
        for way in {ways[head] for head in comparison.heads} - {None}:
            assert way is not None
            heads = mask & np.array([one == way for one in ways])
            spent = max(time_share(stats.kernel_ns, exact_ns) - piecewise_cost(float(given_up.mean())), TIME_SHARE_MIN)
            complete = not comparison.in_use or bool(heads[[one == way for one in ways]].all())
            audit = Audit(errors, missed, signs, heads, given_up, spent if timed else None, complete, comparison.unlike)
            for evidence in shadow.evidence:
                suspects |= evidence.add(self._layer, way, audit, limits if comparison.in_use else None)
        if comparison.in_use and not comparison.unlike:
            self._suspects = tuple(np.flatnonzero(suspects).tolist())
            if shadow.partition.ranges is not None:  # these are read whole
                errors[outside(signs, shadow.partition.ranges, kv_heads)] = 0
            self._count(errors[mask], sum(share.way is not None for share in budget.heads))

    def _count(self, errors: Float32, searched: int) -> None:
        """Count audited answers. errors: float32 `[heads, n]`, of those that were audited of the searched ones."""
        layer_errors = np.sqrt((errors.astype(np.float64) ** 2).mean(axis=0) * searched)
        self.errors = [*self.errors, *layer_errors.tolist()][-ERRORS_MAX:]
        self.audited += len(layer_errors)
        self.largest = max(self.largest, float(layer_errors.max()))


def _served(budget: LayerBudget, heads: Heads) -> bool:
    """Whether some of these KV heads are answered by a way."""
    return any(budget.heads[head].way is not None for head in heads)


def time_share(shadow_ns: float, exact_ns: float) -> float:
    """The time of an answer relative to that of the exact one."""
    return shadow_ns / max(exact_ns, 1)
