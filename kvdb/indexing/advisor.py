"""Decides which indexes will pay, from what queries took so far, and what builds would take and save."""

import logging
from collections.abc import Sequence

import indexes.registry as registry
from kvdb.catalog.evidence.usage import QueryCounts
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.config import IndexConfig
from kvdb.indexing.build import missing_layers
from kvdb.indexing.builder import IndexBuilder
from query_optimizer.build_policy import BuildPolicy, Decision, KindFacts, SegmentFacts, State

log = logging.getLogger(__name__)
REVIEW_QUERIES = 64
"""After this many queries of each layer, the indexes of a segment are reviewed again."""
STEP_SECONDS = 5e-4
"""Seconds that a query takes beside the search of an index: for the window, the values found, and Python."""
BYTE_SECONDS = 1 / 30e9
"""Seconds to read a byte, assumed until a query that reads everything is measured; from benchmarks/README.md."""


class IndexAdvisor:
    """Has indexes built when they will pay: when queries have taken as long as an index would have saved, or are expected to.

    config: segments shorter than its `segment_tokens_min` are only counted; without `automatic`, all segments are only counted.
    """

    def __init__(self, builder: IndexBuilder, policy: BuildPolicy, config: IndexConfig) -> None:
        self._builder = builder
        self._policy = policy
        self._config = config

    def published(self, views: Views) -> None:
        """Build in the background the kinds that `config.at_store` names, over the segments of a context that was stored."""
        for kind in self._config.at_store:
            for view in views:
                if len(view.segment) >= self._config.segment_tokens_min:
                    self._builder.schedule(view.segment, kind)

    def replaced(self, old: Sequence[Segment], new: Segment) -> None:
        """Build in the background, over a segment that took the place of others, the kinds that these had."""
        if len(new) >= self._config.segment_tokens_min:
            for kind in sorted({kind for segment in old for kind in segment.indexes.kinds}):
                self._builder.schedule(new, kind)

    def suggest(self, segment: Segment, kind: str) -> None:
        """Build in the background a kind of index that a plan would use, if the configuration allows it.

        Graphs take long to build, and wait until queries have shown that they pay.
        """
        if kind not in registry.KINDS:  # a rule from outside may name anything
            return
        if kind == self._config.on_demand or (self._config.automatic and not registry.kind(kind).walks):
            self._builder.schedule(segment, kind)

    def build_seconds(self, segment: Segment, kind: str) -> float:
        """What an index of that kind over one layer of a segment is expected to take."""
        return self._builder.costs.of(kind, segment).seconds if registry.is_priced(kind) else 0.0

    def count_session(self, views: Views) -> None:
        """Count a session that was opened over these segments, bring their indexes back from disk, and review a segment that was
        opened often."""
        for view in views:
            self._builder.load(view.segment)
            if view.segment.usage.count_session() % self._policy.opened_often == 0:
                self.review(view.segment)

    def count_queries(self, segment: Segment, counts: QueryCounts) -> None:
        """Count queries of a segment, and review it now and then."""
        if segment.usage.count_queries(counts, segment.indexes.version, REVIEW_QUERIES * len(segment.tables)):
            self.review(segment)

    def review(self, segment: Segment) -> None:
        """Have the indexes built that will pay now."""
        if self._config.automatic and len(segment) >= self._config.segment_tokens_min:
            for decision in self.decide(segment):
                if decision.build:
                    log.info("index %s of segment %d is to be built: %s", decision.kind, segment.number, decision.reason)
                    self._builder.schedule(segment, decision.kind)

    def decide(self, segment: Segment) -> tuple[Decision, ...]:
        """Decide for each kind with a known cost whether it is to be built now, and say why."""
        return self._policy.decide(segment_facts(segment, self._builder))


def segment_facts(segment: Segment, builder: IndexBuilder) -> SegmentFacts:
    """The facts that the policy decides by: how a segment was used, and what each kind of index over it costs and saves."""
    usage = segment.usage
    counts = usage.recent
    limit = builder.nbytes_max
    kinds = [kind for kind in registry.KINDS if registry.is_priced(kind)]
    return SegmentFacts(
        opened=usage.opened,
        queries=counts.queries,
        queries_in_all=usage.queries_in_all,
        kinds=tuple(_kind_facts(segment, kind, counts, builder) for kind in kinds),
        nbytes=0 if limit is None else builder.nbytes(),
        nbytes_max=limit,
    )


def _kind_facts(segment: Segment, kind: str, counts: QueryCounts, builder: IndexBuilder) -> KindFacts:
    """The cost of a kind and what it saves: the seconds that recent queries took (`counts`), minus the seconds expected with the
    index. A query with it takes the kind's share of the time of reading everything, and the time to read as many tokens as recent
    queries attended."""
    cost, missing = builder.costs.of(kind, segment), len(missing_layers(segment, kind))
    progress = segment.indexes.progress.get(kind)
    state: State = "built" if not missing else "missing"
    if progress is not None and progress.state != "ready":
        state = "failed" if progress.state == "failed" else "building"
    token_seconds = segment.usage.exact_token_seconds or BYTE_SECONDS * segment.tables[0].layout.token_nbytes
    attended = counts.attended / counts.searches if counts.searches else 0.0
    expected = STEP_SECONDS + (cost.search_share + attended) * token_seconds * len(segment)
    return KindFacts(
        kind=kind,
        build_seconds=cost.seconds * missing,
        saved_seconds=counts.seconds / counts.queries - expected if counts.queries else 0.0,
        nbytes=round(cost.nbytes * missing),
        state=state,
    )
