"""A stored context."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvdb.catalog.contexts.life import Life
from kvdb.catalog.contexts.prefix_tree import concatenate
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.overlay import Overlay
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views, release_views, visible_tokens
from kvdb.codecs.base import Rounding
from kvdb.storage.budget import Reservation
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import ContextInfo, ContextStatistics, ModelSpec, Tokens, ViewInfo


@dataclass(frozen=True)
class StoredContext:
    """A named layout of segment views, with an overlay of recomputed tokens. ids: those of all its positions, None where its
    views show them. beside: the bytes of the budget that it takes beside its blocks. life: how long it is kept, and how it was
    used. durability: what it is to outlive; see `kvdb.types.DURABILITIES`. salt: what a lookup has to say beside the tokens."""

    name: str
    spec: ModelSpec
    layout: ContextLayout
    ids: PackedIds | None = None
    overlay: Overlay | None = None
    beside: Reservation | None = None
    life: Life = field(default_factory=Life)
    durability: str = "memory"
    salt: str = ""

    @property
    def views(self) -> Views:
        return self.layout.views

    @property
    def tokens(self) -> Tokens:
        """The ids of all its positions, int32, unpacked anew each time."""
        return concatenate(self.views) if self.ids is None else self.ids.unpack()

    @property
    def kept_ids(self) -> int:
        """How many ids it keeps beside those of its segments."""
        return 0 if self.ids is None else len(self.ids)

    @property
    def chunk(self) -> Views:
        """The views of a context that may stand anywhere: the first was computed with nothing before it, and each other one
        behind those before it. Empty for any other context."""
        first, *others = self.views or (None,)
        alone = self.overlay is None and first is not None and first.segment.standalone
        behind = all(not view.segment.standalone and view.shift == self.views[0].shift for view in others)
        return self.views if alone and behind and visible_tokens(self.views) == self.layout.length else ()

    def info(self) -> ContextInfo:
        overlaid = 0 if self.overlay is None else self.overlay.nbytes
        rounding = Rounding.of_all([view.segment.rounding for view in self.views])
        return ContextInfo(
            name=self.name,
            spec=self.spec,
            tokens=self.layout.length,
            segments=len(self.views),
            nbytes=overlaid + sum(view.segment.nbytes + view.segment.states.nbytes for view in self.views),
            chunk=bool(self.chunk),
            blended=not self.plain and not self.chunk,
            salt=self.salt,
            exact=self.plain,
            pinned=self.life.pinned,
            expires=self.life.expires,
            metadata=dict(self.life.metadata),
            created=self.life.created,
            used=self.life.used,
            uses=self.life.uses,
            format="+".join(dict.fromkeys(view.segment.format or "raw" for view in self.views)) if rounding.keys else "",
            key_error=rounding.key_error,
            value_error=rounding.value_error,
            shared_with=self.life.shared_with,
            resident=all(view.segment.resident for view in self.views),
        )

    def view_infos(self) -> list[ViewInfo]:
        """What it sees of its segments, in their order."""
        return [
            ViewInfo(
                segment=view.segment.number,
                begin=view.begin,
                visible=view.visible,
                stored=len(view.segment),
                shift=view.shift,
                nbytes=view.segment.nbytes,
                format=view.segment.format,
                resident=view.segment.resident,
                holders=view.segment.references,
            )
            for view in self.views
        ]

    def ends_in(self, seen: Mapping[Segment, int]) -> bool:
        """Whether all that it sees of its last segment is seen. seen: how many tokens of each segment are."""
        return bool(self.views) and seen.get(self.views[-1].segment, 0) >= self.views[-1].visible

    @property
    def plain(self) -> bool:
        """Whether the context is exact for its tokens, so that it may be found by them."""
        return self.overlay is None and self.layout.plain

    def release(self) -> None:
        """Release the references of a context from `Catalog.acquire`, or of one that was not published."""
        release_views(self.views)
        if self.overlay is not None:
            self.overlay.release()
        if self.beside is not None:
            self.beside.release()

    def statistics(self) -> ContextStatistics:
        segments = [view.segment for view in self.views]
        heads = [kept.shape.q_heads for kept in self.spec.kept]
        known = [s.statistics.of_segment(s.number, len(s), heads, s.known_evidence()) for s in segments]
        if not self.spec.uniform:
            known = [one.at(self.spec.places) for one in known]
        return ContextStatistics(self.name, tuple(known))


def stored_of(contexts: Collection[StoredContext]) -> set[StoredSegment]:
    """What is stored of contexts: their segments and recomputed tokens."""
    stored = {view.segment.stored for context in contexts for view in context.views}
    stored.update(context.overlay.stored for context in contexts if context.overlay is not None)
    return {one for one in stored if one is not None}
