"""What a database holds, read when somebody asks: nothing is counted twice, and no call pays for it."""

from collections.abc import Iterator
from time import time

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdb.database import Database
from kvdb.server.tiers import tier_uses
from kvdb.types import Activity
from kvdb.version import __version__


class DatabaseCollector(Collector):
    """Gauges of a database, and the version and the start of the server."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._started = time()

    def collect(self) -> Iterator[Metric]:
        """The families, with the samples of now."""
        build = GaugeMetricFamily("kvdb_build_info", "1, with the version of the server.", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        yield GaugeMetricFamily("kvdb_start_time_seconds", "When the server started, in seconds since 1970.", self._started)
        yield from self._tiers()
        yield GaugeMetricFamily("kvdb_contexts", "Contexts that are stored.", self._database.count_contexts())
        yield from self._activity(self._database.activity())

    @staticmethod
    def _activity(seen: Activity) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvdb_sessions_open", "Sessions that are open.", seen.sessions_open)
        yield CounterMetricFamily("kvdb_sessions", "Sessions that were opened.", seen.sessions_opened)
        attends = CounterMetricFamily("kvdb_attends", "Queries of a layer, by the rule that chose the plan.", labels=("rule",))
        for rule, queries in sorted(seen.rules.items()):
            attends.add_metric((rule,), queries)
        yield attends
        stages = CounterMetricFamily("kvdb_attend_stage_seconds", "Time of queries by stage.", labels=("stage",))
        for stage, seconds in seen.seconds.items():
            stages.add_metric((stage,), seconds)
        yield stages
        for name, told, value in (
            ("kvdb_context_tokens", "Tokens before each query, summed.", seen.tokens_seen),
            ("kvdb_scanned_tokens", "Tokens that queries looked at in any form.", seen.tokens_scanned),
            ("kvdb_retrieved_tokens", "Tokens that queries attended.", seen.tokens_retrieved),
            ("kvdb_read_bytes", "Bytes that queries read.", seen.bytes_read),
            ("kvdb_missed_mass", "Softmax mass that queries left out, an estimate, summed.", seen.missed_mass),
            ("kvdb_missed_mass_bound", "Softmax mass that queries left out at most, summed.", seen.missed_mass_bound),
        ):
            yield CounterMetricFamily(name, told, value)
        retrieved = seen.tokens_retrieved / seen.tokens_seen if seen.tokens_seen else 1.0
        told = "The share of the tokens before them that queries attended, since the start."
        yield GaugeMetricFamily("kvdb_retrieved_ratio", told, retrieved)
        told = "Tokens of the prompts of sessions by the tier where their KV was found."
        found = CounterMetricFamily("kvdb_prompt_tokens", told, labels=("tier",))
        for tier, tokens in seen.prompt_tokens.items():
            found.add_metric((tier,), tokens)
        yield found

    def _tiers(self) -> Iterator[Metric]:
        taken = GaugeMetricFamily("kvdb_tier_bytes", "Bytes that a tier takes of its memory or disk.", labels=("tier",))
        used = GaugeMetricFamily("kvdb_tier_used_bytes", "Bytes of the blocks of a tier that hold KV.", labels=("tier",))
        for tier in tier_uses(self._database):
            taken.add_metric((tier.name,), tier.taken)
            used.add_metric((tier.name,), tier.used)
        yield taken
        yield used
        limit = GaugeMetricFamily("kvdb_tier_limit_bytes", "What a tier may take; none where it has no limit.", labels=("tier",))
        for name, most in self._database.tier_limits().items():
            limit.add_metric((name,), most)
        yield limit
