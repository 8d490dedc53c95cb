"""Which indexes stand over the segments of a context, which are under way, and which will pay."""

import logging
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

import indexes.registry as registry
from indexes.base import IndexCorrupt
from kvdb.builder import IndexBuilder
from kvdb.catalog.indexes import Progress
from kvdb.catalog.segment import Segment, Views
from kvdb.catalog.use import Asked
from kvdb.errors import IntegrityError, Unavailable
from kvdb.types import IndexInfo
from query_optimizer.materialize import Decision, KindFacts, Materialize, SegmentFacts, State

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.2
"""How often somebody who waits for a build looks whether it is still wanted."""
LOOK_QUERIES = 64
"""Of each layer, until a segment is looked at again."""
STEP_SECONDS = 5e-4
"""What a query that searches takes beside the search: the window, the values found, Python."""
BYTE_SECONDS = 1 / 30e9
"""Of reading everything, until a query did; as benchmarks/README.md has it."""


class Materializer:
    """Has indexes built when they will pay: when queries have taken as long as an index would have saved, or are expected to.

    segment_tokens_min: of shorter segments, and without `automatic` of all, the use is only counted.
    """

    def __init__(self, builder: IndexBuilder, policy: Materialize, segment_tokens_min: int, *, automatic: bool) -> None:
        self._builder = builder
        self._policy = policy
        self._tokens_min = segment_tokens_min
        self._automatic = automatic

    def opened(self, views: Views) -> None:
        """A session was opened over these segments."""
        for view in views:
            if view.segment.use.open() % self._policy.opened_often == 0:
                self.look(view.segment)

    def asked(self, segment: Segment, asked: Asked) -> None:
        """Queries were asked of a segment."""
        if segment.use.add(asked, segment.indexes.version, LOOK_QUERIES * len(segment.tables)):
            self.look(segment)

    def look(self, segment: Segment) -> None:
        """Have built what will pay now."""
        if self._automatic and len(segment) >= self._tokens_min:
            for decision in self.decide(segment):
                if decision.build:
                    log.info("index %s of segment %d is to be built: %s", decision.kind, segment.number, decision.reason)
                    self._builder.wish(segment, decision.kind)

    def decide(self, segment: Segment) -> tuple[Decision, ...]:
        """For each kind that can say what it costs, whether it is to be built now, and why."""
        return self._policy.decide(_facts(segment, self._builder))


def _facts(segment: Segment, builder: IndexBuilder) -> SegmentFacts:
    use = segment.use
    asked = use.now
    limit = builder.nbytes_max
    kinds = [kind for kind in registry.KINDS if registry.is_priced(kind)]
    return SegmentFacts(
        opened=use.opened,
        queries=asked.queries,
        queries_in_all=use.queries_in_all,
        kinds=tuple(_kind_facts(segment, kind, builder) for kind in kinds),
        nbytes=0 if limit is None else builder.nbytes(),
        nbytes_max=limit,
    )


def _kind_facts(segment: Segment, kind: str, builder: IndexBuilder) -> KindFacts:
    """What a kind saves is what queries took lately, less what they are expected to take with it: the share of reading everything
    that the kind says, and what queries attended lately, which every kind reads."""
    cost, asked, layers = builder.prices.of(kind, segment), segment.use.now, len(segment.tables)
    missing = sum(kind not in segment.indexes.of(layer) for layer in range(layers))
    progress = segment.indexes.progress.get(kind)
    state: State = "built" if not missing else "missing"
    if progress is not None and progress.state != "ready":
        state = "failed" if progress.state == "failed" else "building"
    token_seconds = segment.use.whole_token_seconds or BYTE_SECONDS * segment.tables[0].layout.token_nbytes
    attended = asked.attended / asked.searches if asked.searches else 0.0
    expected = STEP_SECONDS + (cost.search_share + attended) * token_seconds * len(segment)
    return KindFacts(
        kind=kind,
        build_seconds=cost.seconds * missing,
        saved_seconds=asked.seconds / asked.queries - expected if asked.queries else 0.0,
        nbytes=round(cost.nbytes * missing),
        state=state,
    )


def wait(builds: list[Future[None]], wanted: Callable[[], bool]) -> None:
    """Until all are done. Raises what the first that failed raised, and Unavailable once they are no longer `wanted`."""
    while pending := futures.wait(builds, LOOK_SECONDS).not_done:
        if not wanted():
            raise Unavailable(f"nobody waits any more for {len(pending)} builds of indexes; they go on in the background")
    for build in builds:
        build.result()


def infos(views: Views) -> list[IndexInfo]:
    """What is built over the segments of a context, and what is under way or failed, by segment and kind."""
    found = []
    for view in views:
        segment, built = view.segment, view.segment.indexes.built()
        for kind in dict.fromkeys([*built, *segment.indexes.progress]):
            standing = built.get(kind, [])
            progress = segment.indexes.progress.get(kind) or Progress("ready", len(standing) / len(segment.tables))
            found.append(
                IndexInfo(
                    segment=segment.number,
                    tokens=len(segment),
                    kind=kind,
                    layers=len(standing),
                    layers_total=len(segment.tables),
                    nbytes=sum(index.nbytes for index in standing),
                    state=progress.state,
                    progress=progress.share,
                    seconds=progress.seconds,
                    seconds_expected=progress.seconds_expected,
                    error=progress.error,
                )
            )
    return found


def verify(views: Views) -> int:
    """Check every index over these segments against its keys; how many were checked. Raises IntegrityError."""
    count = 0
    for view in views:
        for kind, built in view.segment.indexes.built().items():
            for index in built:
                try:
                    index.verify()
                except IndexCorrupt as error:
                    raise IntegrityError(
                        f"index {kind} of segment {view.segment.number} does not fit its keys: {error}"
                    ) from None
                count += 1
    return count
