"""Audits of one layer of a session: exact answers, compared with the answers of other ways.

A way that is not proven runs in the shadow of answers that are exact anyway; a way in use is audited by reading some KV heads
whole now and then. The comparison follows the answer: another thread makes it, until the layer is used again.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from time import perf_counter

import numpy as np

from indexes.retrieval import Exact
from kvdb.attention.device import DeviceFailed
from kvdb.attention.exact import AttentionStats
from kvdb.attention.signs import SIGNS, outside
from kvdb.catalog.evidence.way_record import Audit
from kvdb.errors import KvdbError
from kvdb.indexing.background_time import StepClock
from kvdb.planning.budget import QUERIES_MAX, refreshed
from kvdb.planning.planner import Planner
from kvdb.planning.prepared import Prepared, Variant
from kvdb.session.answer_errors import given_up_heads, head_errors, largest_missed
from kvdb.session.comparison import Comparison, Execute
from kvdb.session.recent_queries import RecentQueries
from kvdb.types import Array, Float32
from query_optimizer.error_budget import trial_of
from query_optimizer.head_shares import TIME_SHARE_GUESS
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.query_options import NO_OPTIONS, QueryOptions
from query_optimizer.rule import Heads, piecewise_cost
from query_optimizer.ways import LayerBudget, Way, WayFacts

log = logging.getLogger(__name__)
# size: what is compared with what, when there is time for it, and what came of it, of which each needs the others

AUDIT_SHARE = 0.05
"""The share of time that audits of ways in use may take, relative to all answers, where there is time for more heads than one."""
AUDITS_AT_FIRST = 2.0
"""A session may audit this many queries from its first steps on, because they may ask for something new."""
WORTH_SHARE = 0.05
"""Where attention takes less of a step, nothing is tried: the fastest way could not save what anybody would notice."""
EXPECTED_TOKENS = 256
"""So many tokens are expected of a session that does not say it."""
HAND_OVER_SECONDS, BESIDE_COUNTS = 1e-3, 8
"""What a comparison takes beside its answer, assumed until one was made; it is the mean of so many of the last, about."""
AUDIT_QUERIES, AUDIT_QUERIES_MAX = 32, 128
"""The number of queries between two audits, if there is time for one, and at most; with more time, more heads are audited at
once."""
ERRORS_MAX = 1024
"""The number of errors that are kept for the statistics of the session."""
LOOK_QUERIES = 32
"""A layer that compares nothing looks after about this number of queries whether there is something to try now."""
RECENT_QUERIES = 16
"""So many queries are answered in the shadow at once, which takes less for each than one at a time."""
RETRY_QUERIES = 4
"""A layer that has gathered these looks again after so many queries whether there is time."""
FIRST_QUERIES = 32
"""So many of an ended session's queries are enough to see that a way is hopeless."""
IDLE_QUERIES_MAX = 1 << 20
EXACT = QueryOptions(Exact())
TIME_SHARE_MIN = 0.01
"""The least assumed time of a search, relative to an exact answer."""


class Audits:
    """Decides which answers are compared, compares them, and tells the evidence.

    errors: estimates of the layer's relative error from audits of ways in use, the last ERRORS_MAX. audited, largest: how many
    there were, and the largest. ways: how many queries each way answered, for some head. planner: that of the layer. clock: of
    the layer's steps; all that is compared is paid from its account. expected_tokens: that the session is for. The owner calls
    `settle` before each use of the layer, because the executor compares in another thread.
    """

    def __init__(self, layer: int, planner: Planner, executor: Executor, clock: StepClock, expected_tokens: int) -> None:
        self.errors: list[float] = []
        self.audited, self.largest = 0, 0.0
        self.ways: dict[str, int] = {}
        self._layer = layer
        self.planner = planner
        self._executor = executor
        self._clock = clock
        self._beside = HAND_OVER_SECONDS
        self._query_ns = 0.0
        self._recent = RecentQueries(RECENT_QUERIES)
        self._options = NO_OPTIONS
        self._running: Future[None] | None = None
        self._answer_ns = 0.0
        self._audit_ns = 0.0
        self._whole_ns = 0.0
        self._since = AUDIT_QUERIES
        self._suspects: tuple[int, ...] = ()
        self._next_head = 0
        self._looked_at: LayerBudget | None = None
        self._looked_for = 0
        self._trial: tuple[WayFacts, Heads] | None = None
        self._seated = self._unproven = False
        self._expected_tokens, self._asked = expected_tokens, 0
        self._attention_share, self._pays_after, self._expected = 1.0, 0.0, 0.0

    def due(self, prepared: Prepared, n: int, options: QueryOptions, *, alone: bool = True) -> Comparison | None:
        """What the answer to n queries is to be compared with, None for nothing. alone: whether the served plan may be another
        than the prepared one."""
        budget = prepared.budget
        if n <= QUERIES_MAX:
            self._clock.look(n)
        else:
            self._clock.busy()
        if budget is None or not prepared.learns:
            return None
        began = perf_counter()
        for evidence in prepared.evidence:
            evidence.count_queries(self._layer, n)
        comparison = self._due(prepared, budget, n, options, alone=alone)
        if comparison is not None:
            self._clock.account.spend(perf_counter() - began)
        return comparison

    def _due(self, prepared: Prepared, budget: LayerBudget, n: int, options: QueryOptions, *, alone: bool) -> Comparison | None:
        searched = prepared.searched_heads
        heads = self._heads_due(searched, self._exact_call_ns(budget)) if alone and prepared.searches else ()
        if heads:
            served = self.planner.prepare(n, options, Variant(whole=heads))
            return Comparison(served, prepared, heads, in_use=True)
        trial = self._affordable_trial(budget, prepared, n, alone=alone)
        if trial is None:
            return None
        facts, compared = trial
        extra = _served(budget, compared)
        shadow = self.planner.prepare(n, options, Variant(trial=facts.way))
        if not shadow.searches:
            return None
        served = self.planner.prepare(n, options, Variant(whole=searched)) if extra else prepared
        return Comparison(served, shadow, compared, in_use=False, extra=extra)

    def unlike(self, prepared: Prepared, stats: AttentionStats) -> Comparison | None:
        """What an answer by a plan is to be compared with because heads were read whole for a query that is unlike those for
        which their ways were proven; None where none were, or there is no time. stats: of the answer."""
        if stats.unlike is None or not prepared.learns or prepared.budget is None:
            return None
        one = TIME_SHARE_GUESS * self._exact_call_ns(prepared.budget) / 1e9
        if not self._clock.account.allows(one + self._beside):
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
        else:
            if comparison is not None and comparison.extra:
                self._clock.account.spend(stats.kernel_ns / 1e9)
            self._whole_ns = stats.kernel_ns / q.shape[1]
        self._looked_for += q.shape[1]
        self._asked += q.shape[1]
        self._options = options
        end = self.planner.run.tokens
        if self.keeps:
            self._recent.add(q, out, served.searched_heads if served.searches else (), end)
        if comparison is None:
            return
        shadow, many = comparison.shadow, None
        if not (comparison.in_use or comparison.extra) and shadow.partition.device is None:
            behind = shadow.partition.behind(self.planner.run)
            many = self._recent.read_whole(comparison.heads, end, min(RECENT_QUERIES, behind))
            self._recent.compared()
        q, out = (q.copy(), out.copy()) if many is None else many
        given = comparison, q, out, exact_ns, options, execute
        if comparison.shadow.partition.device is not None:
            self._compare(*given)  # a device answers one thread at a time
        else:
            self._running = self._executor.submit(self._compare, *given)

    def idle_steps(self, prepared: Prepared) -> int:
        """How many queries may be answered by a plan before it is time to look again whether the next is to be compared; 0 if it
        is."""
        return self._clock.until_next(self._compares_in(prepared))

    def _compares_in(self, prepared: Prepared) -> int:
        """The same, but for looks that only tell that the session goes on."""
        budget = prepared.budget
        self._unproven = budget is not None and prepared.learns
        if budget is None or not prepared.learns:
            self._gather(False)
            return IDLE_QUERIES_MAX
        if not self._clock.seconds:
            return 1
        if not budget.ways:  # the plan ends when there is a first one
            self._worth(prepared, budget)
            return IDLE_QUERIES_MAX
        if self._suspects:
            return 0
        if self._running is not None and not self._running.done():
            return RECENT_QUERIES
        return min(self._audit_in(prepared, budget), self._trial_in(prepared, budget))

    def notes(self) -> tuple[str, ...]:
        """What EXPLAIN says of proofs that are not begun."""
        if self._attention_share < WORTH_SHARE:
            share, least = f"{self._attention_share:.1%}", f"{WORTH_SHARE:.0%}"
            return (f"no way is tried: attention takes {share} of a step, and less than {least} is not worth a proof",)
        if self._expected < self._pays_after:
            pays, expected = f"{self._pays_after:,.0f}", f"{self._expected:,.0f}"
            return (f"no way is tried: its proof would pay after {pays} tokens, and {expected} are expected",)
        return ()

    @property
    def keeps(self) -> int:
        """How many of the last queries and answers are to be kept."""
        return RECENT_QUERIES if self._seated else 0

    def follow(self, prepared: Prepared, stats: AttentionStats, queries: int, recent: tuple[Array, Array] | None = None) -> None:
        """Count queries that were answered by a plan and compared with nothing. stats: sums over them. recent: the last of them,
        `[q_heads, m, head_dim]`, and their answers."""
        self._clock.look(queries)
        if recent is not None:
            self._recent.add(*recent, prepared.searched_heads if prepared.searches else (), self.planner.run.tokens)
        if prepared.budget is None:
            return
        if prepared.learns:
            for evidence in prepared.evidence:
                evidence.count_queries(self._layer, queries)
        for way in prepared.ways:
            self.ways[way] = self.ways.get(way, 0) + queries
        self._looked_for += queries
        self._asked += queries
        if prepared.searches:
            self._answer_ns += stats.kernel_ns
            self._since += queries
        else:
            self._whole_ns = stats.kernel_ns / queries

    def forget_recent(self) -> None:
        """What the last queries read changes, or is taken back."""
        self._recent.forget()

    def close(self) -> QueryOptions | None:
        """Nothing more is compared. Returns with what queries were asked that would tell more, None where they would not."""
        alike = self._asked + self.planner.asked_before()  # as many will be asked again
        pays = self._clock.seconds > 0 and self._attention_share >= WORTH_SHARE and alike >= self._pays_after
        wanted = self._unproven and pays
        self._gather(False)
        self._clock.close()
        return self._options if wanted else None

    def prove(self, q: Array, options: QueryOptions, execute: Execute, goes_on: Callable[[], bool]) -> bool:
        """Compare every way that may be tried with exact answers to queries of a session that has ended, as long as it goes on;
        one that is refuted by the first of them is left at that. Returns whether an index is built now by which more could be
        tried."""
        whole = self.planner.prepare(1, EXACT)
        pieces = [q[:, -FIRST_QUERIES:], q[:, :-FIRST_QUERIES]]
        answers, asked = [self._exact(whole, piece, execute) for piece in pieces if piece.shape[1]], dict[Way, int]()
        while goes_on():
            prepared = self.planner.prepare(1, options)
            budget = prepared.budget
            trial = None if budget is None or not prepared.learns else trial_of(refreshed(budget, prepared.evidence, self._layer))
            piece = 0 if trial is None else asked.get(trial[0].way, 0)
            if trial is None or piece == len(answers):
                wished = bool(prepared.wishes)
                self.planner.suggest(prepared)
                return wished
            asked[trial[0].way] = piece + 1
            shadow = self.planner.prepare(1, options, Variant(trial=trial[0].way))
            most = shadow.partition.behind(self.planner.run)
            if shadow.searches and most > 0:
                exact, exact_ns = answers[piece]
                comparison = Comparison(whole, shadow, trial[1], in_use=False)
                self._compare(comparison, pieces[piece][:, -most:], exact[:, -most:], exact_ns, options, execute)
        return False

    def _exact(self, whole: Prepared, q: Array, execute: Execute) -> tuple[Array, float]:
        """The exact answers to queries, as those of the last tokens, and the nanoseconds that one of them takes."""
        out = execute(whole, q, EXACT, False, judged=False)[0].out
        return out, execute(whole, q[:, -1:], EXACT, False, judged=False)[1].kernel_ns

    def settle(self) -> None:
        """Wait for the comparison under way: it reads what the next call may change."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _affordable_trial(self, budget: LayerBudget, prepared: Prepared, n: int, *, alone: bool) -> tuple[WayFacts, Heads] | None:
        """The way to try now, and for which KV heads; None for none, or where there is no time for it. For heads that are
        searched, an exact answer has to be made too, which takes a plan of its own."""
        worth = self._worth(prepared, budget)
        if not budget.ways:
            self._unproven = True
            return None
        trial = self._trial_of(budget, prepared)
        self._unproven = trial is not None or bool(prepared.wishes)
        trial = trial if worth else None
        self._gather(trial is not None)
        if trial is None:
            return None
        facts, heads = trial
        extra = _served(budget, heads)
        again = self._recent.ends_at(self.planner.run.tokens)  # callers that only ask come to no more than one
        if not (extra or again) and len(self._recent) + n < RECENT_QUERIES:
            return None
        possible = (alone or not extra) and self._may_try(budget, facts, n if again else RECENT_QUERIES, extra)
        return trial if possible else None

    def _audit_in(self, prepared: Prepared, budget: LayerBudget) -> int:
        """How many queries may be answered before a way in use may have to be audited, 0 for none."""
        if not prepared.searches or not prepared.searched_heads:
            return IDLE_QUERIES_MAX
        if self._since < AUDIT_QUERIES:
            return AUDIT_QUERIES - self._since
        least = piecewise_cost(1 / len(prepared.searched_heads)) * self._exact_call_ns(budget)
        return 0 if self._may_audit(least) else RECENT_QUERIES

    def _trial_in(self, prepared: Prepared, budget: LayerBudget) -> int:
        """How many queries may be answered before a way may have to be tried, 0 for none."""
        trial = self._trial_of(budget, prepared)
        self._unproven = trial is not None or bool(prepared.wishes)
        if not self._worth(prepared, budget):
            trial = None
        self._gather(trial is not None)
        if trial is None:
            return max(LOOK_QUERIES - self._looked_for, 1)
        if not self._seated:
            return LOOK_QUERIES + self._layer % LOOK_QUERIES  # not all layers look at once
        facts, heads = trial
        extra = _served(budget, heads)
        missing = 0 if extra else RECENT_QUERIES - len(self._recent) - 1
        if missing > 0:
            return missing
        return 0 if self._may_try(budget, facts, RECENT_QUERIES, extra) else RETRY_QUERIES

    def _gather(self, wanted: bool) -> None:
        """Have queries compared from now on, or no longer; beside steps where it is this layer's turn."""
        self._seated = wanted and self._clock.account.seats(self)
        if not wanted:
            self._clock.account.leave(self)
        if not self._seated:
            self._recent.forget()

    def _trial_of(self, budget: LayerBudget, prepared: Prepared) -> tuple[WayFacts, Heads] | None:
        """The way to try next, and for which KV heads. It stays the same until an audit or another plan tells more, or other
        sessions may have."""
        if self._looked_at is not budget or self._looked_for >= LOOK_QUERIES:
            self._trial = trial_of(refreshed(budget, prepared.evidence, self._layer))
            self._looked_at, self._looked_for = budget, 0
        return self._trial

    def _worth(self, prepared: Prepared, budget: LayerBudget) -> bool:
        """Whether a faster way could save what anybody notices, and more than its proof takes."""
        if not self._clock.seconds:
            return False
        exact = self._exact_call_ns(budget) / 1e9
        self._attention_share = self._clock.layers * exact / self._clock.seconds
        asked = self._layer, len(budget.heads), budget.error_max
        needed = max((one.audits_needed(*asked) for one in prepared.evidence), default=AUDITS_MIN)
        proof = needed * TIME_SHARE_GUESS * exact + self.planner.build_seconds(prepared)
        self._pays_after = proof / ((1 - TIME_SHARE_GUESS) * exact)
        self._expected = max(self._expected_tokens - self._asked, 0) + self.planner.asked_before()
        worth = self._attention_share >= WORTH_SHARE and self._expected >= self._pays_after
        if worth and prepared.wishes:
            self.planner.suggest(prepared)
        return worth

    def _may_try(self, budget: LayerBudget, facts: WayFacts, queries: int, extra: bool) -> bool:
        """Whether there is time to try a way with so many queries, or with one that is answered exactly for it."""
        exact = self._exact_call_ns(budget)
        one = self._query_ns or (TIME_SHARE_GUESS if facts.time_share is None else facts.time_share) * exact
        ns = exact + one if extra else queries * one
        return self._clock.account.claims(ns / 1e9 + self._beside, RETRY_QUERIES * self._clock.seconds)

    def _may_audit(self, ns: float) -> bool:
        """Whether a way in use is audited now, which takes so long."""
        return self._since >= AUDIT_QUERIES_MAX or self._clock.account.allows(ns / 1e9 + self._beside)

    def _exact_call_ns(self, budget: LayerBudget) -> float:
        """What an exact answer takes: the last one, or what is expected."""
        return self._whole_ns or 1e9 * budget.read_seconds

    def _heads_due(self, searched: tuple[int, ...], whole_ns: float) -> tuple[int, ...]:
        """The KV heads in use that are to be read whole for an audit now."""
        suspects = tuple(head for head in self._suspects if head in searched)
        self._suspects = ()
        if suspects:
            return suspects
        if not searched or self._since < AUDIT_QUERIES:
            return ()
        spendable = AUDIT_SHARE * self._answer_ns + AUDITS_AT_FIRST * whole_ns - self._audit_ns
        count = len(searched)
        while count > 1 and piecewise_cost(count / len(searched)) * whole_ns > spendable:
            count -= 1
        ns = piecewise_cost(count / len(searched)) * whole_ns
        if not self._may_audit(ns):
            return ()
        self._since = 0
        self._audit_ns += ns
        self._clock.account.spend(ns / 1e9)
        first = self._next_head % len(searched)
        self._next_head += count
        turned = searched[first:] + searched[:first]
        return tuple(sorted(turned[:count]))

    def _compare(
        self,
        comparison: Comparison,
        q: Array,
        exact: Array,
        exact_ns: float,
        options: QueryOptions,
        execute: Execute,
    ) -> None:
        """Compare exact answers with others, and tell the evidence. exact_ns: what one exact answer takes."""
        shadow = comparison.shadow
        budget = shadow.budget
        assert budget is not None
        self._looked_at = None
        began, n = perf_counter(), q.shape[1]
        try:
            state, stats = execute(shadow, q, options, n == 1, judged=False)
            # as they come, queries are searched one by one
            alone = stats if n == 1 or comparison.in_use else execute(shadow, q[:, -1:], options, True, judged=False)[1]
        except (KvdbError, DeviceFailed) as failure:
            log.warning("an audit of layer %d failed: %s", self._layer, failure)
            return
        kv_heads = len(budget.heads)
        errors = head_errors(state.out, exact, kv_heads)
        missed = largest_missed(stats, errors.shape)
        signs = np.full((SIGNS, *q.shape[:2]), np.nan, np.float32) if stats.signs is None else stats.signs
        mask = np.zeros(kv_heads, np.bool_)
        mask[list(comparison.heads)] = True
        given_up = given_up_heads(stats, kv_heads, n)
        timed_share = None if comparison.in_use else self._time_share(alone, exact_ns, kv_heads)
        limits = np.array([share.error_max for share in budget.heads])
        ways = [budget.way_of(head) for head in range(kv_heads)]
        suspects = np.zeros(kv_heads, np.bool_)
        for way in {ways[head] for head in comparison.heads} - {None}:
            assert way is not None
            heads = mask & np.array([one == way for one in ways])
            complete = not comparison.in_use or bool(heads[[one == way for one in ways]].all())
            audit = Audit(errors, missed, signs, heads, given_up, timed_share, complete, comparison.unlike)
            for evidence in shadow.evidence:
                suspects |= evidence.add(self._layer, way, audit, limits if comparison.in_use else None)
        if comparison.in_use and not comparison.unlike:
            self._suspects = tuple(np.flatnonzero(suspects).tolist())
            if shadow.partition.ranges is not None:  # these are read whole
                errors[outside(signs, shadow.partition.ranges, kv_heads)] = 0
            self._count(errors[mask], sum(share.way is not None for share in budget.heads))
        spent = perf_counter() - began
        self._clock.account.spend(spent)
        self._beside += (max(spent - stats.kernel_ns / 1e9, 0.0) - self._beside) / BESIDE_COUNTS
        self._query_ns = stats.kernel_ns / n

    def _time_share(self, alone: AttentionStats, exact_ns: float, kv_heads: int) -> float | None:
        """What a search for one query takes of the time of an exact answer, without what it read whole because it gave up; None
        where it gave up on everything. alone: of that search."""
        given_up = given_up_heads(alone, kv_heads, 1)
        if given_up.all():
            return None
        return max(time_share(alone.kernel_ns, exact_ns) - piecewise_cost(float(given_up.mean())), TIME_SHARE_MIN)

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
