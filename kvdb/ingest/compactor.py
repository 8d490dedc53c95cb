"""Gives back the space of tokens that no context names any more, and of blocks that are hardly filled."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock

import kvdb.catalog.contexts.residency as residency
from kvdb.catalog.catalog import Catalog, Text
from kvdb.catalog.compaction.chains import Chain, Twins, groups_of
from kvdb.catalog.compaction.holders import Holder
from kvdb.catalog.compaction.relayout import Relayout, Target
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView
from kvdb.errors import CapacityError, IntegrityError, InvalidArgument, Unavailable
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.ingest.cold import Cold
from kvdb.ingest.rebuilt import RebuiltPart, copyable, rebuilt
from kvdb.storage.store import BlockStore

log = logging.getLogger(__name__)
LEFT = "contexts take more space than they need: %s"
COLD = "a segment that is not used stays in its format: %s"


class Compactor:
    """Lays stored segments out anew where they take more blocks than their contexts need. Thread-safe; one call works at a time.

    A segment is never changed: another one takes its place in the contexts, which shares its whole blocks, and in open sessions
    over prefixes, between two calls; those that are in a call go over when the next one begins. Blended sessions go on with what
    they hold. What is known of the old one, its evidence and statistics, ends with it, as it is of other tokens;
    its sample queries go over, and its kinds of index are built again in the background.

    Where the configuration has a format for what is cold, segments whose contexts were long not used are written anew in it.

    With a durable catalogue, whose segments are files, everything is done in a thread of its own; otherwise by who stores or
    drops, as whole blocks are shared and not copied.
    """

    def __init__(self, catalog: Catalog, blocks: BlockStore, advisor: IndexAdvisor, cold: Cold) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._advisor = advisor
        self._cold = cold
        self._held: list[Segment] = []
        self._executor = ThreadPoolExecutor(1, "kvdb-compact") if catalog.on_disk else None
        self._waiting: Future[None] | None = None
        self._turn = Lock()
        self._late: dict[Holder, list[Relayout]] = {}  # what sessions are to go over to
        self._late_lock = Lock()
        self._stopped = self._asked = False

    def settle(self) -> None:
        """Give back what stored and dropped contexts left behind. Segments that would have to be loaded for it are left to
        `compact`. It waits for nobody: where another thread is at work, that one goes on with what is left."""
        self._asked = not self._stopped
        if self._stopped:
            return
        if self._executor is None:
            self._settle_asked()
        elif self._waiting is None or self._waiting.running() or self._waiting.done():
            self._waiting = self._executor.submit(self._settle)
            self._waiting.add_done_callback(_log_failure)

    def compact(self) -> None:
        """Give back whatever can be, also of segments on disk, and return when it is done. What finds no room in main memory or
        on disk meanwhile is left as it is, with a line in the log. Raises Unavailable, and IntegrityError for a segment on disk
        that was changed."""
        with self._turn:
            self._go_on()
            for text in self._catalog.texts():
                try:
                    self._lay_out(text, load=True)
                except CapacityError as error:
                    log.warning(LEFT, error)
            self._trim_blends(load=True)
            self._cool()
        if self._executor is None:
            self._settle_asked()

    def wait(self) -> None:
        """Wait until what was stored and dropped until now is laid out anew; only where that is done in a thread of its own."""
        if self._waiting is not None:
            wait([self._waiting])

    def held_segments(self) -> list[Segment]:
        """The segments that it works on."""
        with self._late_lock:
            targets = [target.segment for late in self._late.values() for relayout in late for target in relayout.targets]
        return [*self._held, *targets]

    def hold(self, session: Holder) -> None:
        """See `kvdb.session.services.SpaceKeeper`."""
        self._catalog.hold(session)

    def let_go(self, session: Holder) -> bool:
        """See `kvdb.session.services.SpaceKeeper`."""
        left = self._catalog.let_go(session)
        late = self._take_late(session)
        _release(late)
        return left or bool(late)

    def catch_up(self, session: Holder) -> None:
        """See `kvdb.session.services.SpaceKeeper`."""
        late = self._take_late(session)
        for relayout in late:
            session.go_over(relayout)
        _release(late)

    def stop(self) -> None:
        """Begin nothing more, because the database ends."""
        self._stopped = True

    def close(self) -> None:
        """Wait for what is under way. Closing twice does nothing."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def _settle_asked(self) -> None:
        """Settle as often as somebody asks for it, if no other thread does. Who has the turn looks again behind it."""
        while self._asked and self._turn.acquire(blocking=False):
            try:
                self._asked = False
                self._settle_changed()
            finally:
                self._turn.release()

    def _settle(self) -> None:
        with self._turn:
            self._settle_changed()

    def _settle_changed(self) -> None:
        """Lay out anew what changed. The caller has the turn."""
        self._go_on()
        for text in self._catalog.take_changed():
            try:
                self._lay_out(text, load=False)
            except (CapacityError, Unavailable, IntegrityError) as error:
                log.warning(LEFT, error)
        self._trim_blends(load=False)
        if self._executor is not None and self._cold.is_due():
            self._cool()

    def _lay_out(self, text: Text, *, load: bool) -> None:
        """Lay out anew what a text goes through. load: whether segments may be loaded from disk for it."""
        done: Twins | None = None
        while (twins := self._catalog.twins(text)) is not None:
            with self._holding(twins.segments):
                if twins == done or not (load or all(segment.whole for segment in twins.segments)):
                    break
                if not self._join(text, twins):
                    break
            done = twins
        chains = self._catalog.chains(text)
        with self._holding(segment for chain in chains for segment in chain.segments):
            for chain in reversed(chains):  # the last first, so that the places of the others stay
                if load or all(segment.whole for segment in chain.segments):
                    self._shorten(text, chain)

    def _join(self, text: Text, twins: Twins) -> bool:
        """Let contexts that see the pieces see the other segment, as far as it holds the same tokens. Returns whether they can:
        what they see stays as it was rounded."""
        if len({segment.format for segment in twins.segments}) > 1:
            return False
        held = Target(twins.other.segment, twins.common, twins.other.length)
        left = sum(piece.length for piece in twins.pieces) - twins.common
        if not left:
            self._replace(text, Relayout(twins.place, twins.pieces, (held,)))
            return True
        last = twins.pieces[-1]
        parts = [RebuiltPart(last.segment, last.length - left, last.length)]
        if not copyable(parts):
            return False
        with self._built(parts) as rest:
            self._replace(text, Relayout(twins.place, twins.pieces, (held, Target.whole(rest))))
        return True

    def _shorten(self, text: Text, chain: Chain) -> None:
        """Replace the segments of a chain by fewer, or shorter ones, where that is worth it."""
        pieces = chain.pieces
        block_size = pieces[0].segment.tables[0].layout.block_size
        for group in reversed(groups_of(pieces, block_size)):
            place = chain.place if not group.start else (pieces[group.start - 1].segment.number, pieces[group.start - 1].length)
            parts = [RebuiltPart(piece.segment, 0, piece.length) for piece in pieces[group]]
            if copyable(parts):
                with self._built(parts) as new:
                    self._replace(text, Relayout(place, pieces[group], (Target.whole(new),)))

    def _cool(self) -> None:
        """Bring what is cold into its format. What finds no room is left as it is, with a line in the log."""
        for text, place, piece in self._catalog.cold(self._cold.before()) if self._cold.format else ():
            with self._holding([piece.segment]):
                try:
                    with self._built([RebuiltPart(piece.segment, 0, piece.length)], self._cold.format) as new:
                        self._replace(text, Relayout(place, (piece,), (Target.whole(new),)))
                except (CapacityError, InvalidArgument, Unavailable, IntegrityError) as error:
                    log.warning(COLD, error)

    def _trim_blends(self, *, load: bool) -> None:
        """Cut off what blended contexts do not see of segments that nobody else holds. Blocks are shared, not copied."""
        found = self._catalog.partly_seen()
        with self._holding(one.segment for one in found):
            for one in found:
                if load or one.segment.whole:
                    try:
                        with self._built([RebuiltPart(one.segment, 0, one.seen)]) as new:
                            self._catalog.trim(one, new)
                    except (CapacityError, Unavailable, IntegrityError) as error:
                        log.warning(LEFT, error)

    def _replace(self, text: Text, relayout: Relayout) -> None:
        """Let contexts, and sessions as soon as they can, see the targets instead of the pieces. The caller owns a reference to
        each segment. Raises what `Catalog.replace` does."""
        self._catalog.replace(text, relayout)
        for session in self._catalog.holders(text, relayout):
            with self._late_lock:
                if not self._catalog.holds(session):
                    continue
                for target in relayout.targets:
                    target.segment.retain()
                self._late.setdefault(session, []).append(relayout)
                session.due = True
            session.try_catch_up()

    def _go_on(self) -> None:
        """Try those sessions once more that were in a call."""
        with self._late_lock:
            late = list(self._late)
        for session in late:
            session.try_catch_up()

    def _take_late(self, session: Holder) -> list[Relayout]:
        """What a session is to go over to, for the caller, who then owns the references to the targets."""
        with self._late_lock:
            session.due = False
            return self._late.pop(session, [])

    @contextmanager
    def _built(self, parts: Sequence[RebuiltPart], format: str | None = None) -> Iterator[Segment]:  # noqa: A002  # the field's name
        """A new segment of these parts, which contexts may take references to while the body runs. format: as in `rebuilt`."""
        segments = [part.segment for part in parts]
        with residency.pinned(tuple(SegmentView(segment, len(segment)) for segment in segments), self._blocks.loader):
            new = rebuilt(parts, self._blocks, format)
        with self._holding([new]):
            yield new
            self._advisor.replaced(segments, new)

    @contextmanager
    def _holding(self, segments: Iterable[Segment]) -> Iterator[None]:
        """Hold segments, of each of which a reference is taken over, while the body runs."""
        taken = list(segments)
        before = self._held
        self._held = [*before, *taken]
        try:
            yield
        finally:
            for segment in taken:
                segment.release()
            self._held = before


def _release(late: Sequence[Relayout]) -> None:
    for relayout in late:
        for target in relayout.targets:
            target.segment.release()


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("space is not given back any more by what was stored or dropped until now", exc_info=error)
