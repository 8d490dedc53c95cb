"""The catalogue: contexts by name, chunks by their text, and a prefix tree for each spec."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from heapq import nsmallest
from pathlib import Path
from threading import Lock

from kvdb.catalog.layout import Layout
from kvdb.catalog.life import Life
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.packed_ids import PackedIds
from kvdb.catalog.prefix_tree import PrefixTree, concatenate
from kvdb.catalog.segment import Segment, Views, release_views
from kvdb.errors import AlreadyExists, NotFound, Unsupported
from kvdb.storage.budget import Reservation
from kvdb.storage.segment_file import SegmentFile
from kvdb.types import ContextInfo, ContextStatistics, ModelSpec, Tokens


@dataclass(frozen=True)
class Context:
    """A named layout of segment views, with an overlay of recomputed tokens. ids: those of all its positions, None where its
    views show them. beside: the bytes of the budget that it takes beside its blocks. life: how long it is kept, and how it was
    used. durability: what it is to outlive; see `kvdb.types.DURABILITIES`. salt: what a lookup has to say beside the tokens."""

    name: str
    spec: ModelSpec
    layout: Layout
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
    def chunk(self) -> Segment | None:
        """The segment that a context which is a chunk begins: a single one, which was computed with nothing before it."""
        if self.overlay is None and len(self.views) == 1 and self.views[0].segment.standalone:
            return self.views[0].segment
        return None

    def info(self) -> ContextInfo:
        overlaid = 0 if self.overlay is None else self.overlay.nbytes
        return ContextInfo(
            name=self.name,
            spec=self.spec,
            tokens=self.layout.length,
            segments=len(self.views),
            nbytes=overlaid + sum(view.segment.nbytes for view in self.views),
            chunk=self.chunk is not None,
            blended=not self.plain and self.chunk is None,
            salt=self.salt,
            exact=self.plain,
        )

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
        shape = self.spec.layers, self.spec.q_heads
        known = [s.statistics.of_segment(s.number, len(s), shape, s.known_evidence()) for s in segments]
        return ContextStatistics(self.name, tuple(known))


class Catalog:
    """Contexts and the segments they hold references to. Thread-safe."""

    def __init__(self) -> None:
        self._contexts: dict[str, Context] = {}
        self._trees: dict[tuple[str, str], PrefixTree] = {}
        self._chunks: dict[tuple[str, str, bytes], Counter[Segment]] = {}  # and how many contexts name each
        self._borrowed: list[Context] = []
        self._changed: list[Context] = []
        self._lock = Lock()

    def durability(self, asked: str | None) -> str:
        """What a context is to outlive, if the caller asks for that. Raises Unsupported for more than a database without a store
        can promise."""
        if asked not in {None, "memory"}:
            raise Unsupported(f"durability={asked!r} needs a store, and this database keeps nothing: kvdb.connect(FOLDER)")
        return "memory"

    def publish(self, context: Context) -> Context:
        """Make a context visible; it takes over the caller's references to its segments. Returns it as it is stored. Raises
        AlreadyExists."""
        with self._lock:
            self._check_free(context.name)
            self._add(context)
            self._note_change(context)
        return context

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists when the name is taken."""
        with self._lock:
            self._check_free(name)

    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> Views:
        """Views of the longest prefix of `tokens` that is stored under that salt. The caller owns one reference to each view's
        segment."""
        with self._lock:
            tree = self._trees.get((spec.digest, salt))
            views = tree.match(tokens) if tree else ()
            for view in views:
                view.segment.retain()
            return views

    def chunk(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> Segment | None:
        """A segment that begins with the chunk of exactly these tokens, if it is stored under that salt. The caller owns one
        reference to it."""
        with self._lock:
            segments = self._chunks.get(_text(spec, tokens, salt))
            if segments is None:
                return None
            segment = next(iter(segments))
            segment.retain()
            return segment

    def get(self, name: str) -> Context:
        """Raises NotFound."""
        with self._lock:
            return self._find(name)

    def acquire(self, name: str) -> Context:
        """A context for the caller, who owns a reference to each view's segment, and a share of the overlay, until
        `Context.release`. Raises NotFound."""
        with self._lock:
            context = self._find(name)
            overlay = None if context.overlay is None else context.overlay.share()
            for view in context.views:
                view.segment.retain()
            return replace(context, overlay=overlay, beside=None)

    @contextmanager
    def borrow(self, name: str) -> Iterator[Context]:
        """A context that is kept while the body runs, even if it is dropped meanwhile; see `alive`. Raises NotFound."""
        context = self.acquire(name)
        with self._lock:
            self._borrowed.append(context)
        try:
            yield context
        finally:
            self._release(context)

    def close(self) -> None:
        """The database ends; nothing is asked of the catalogue any more."""

    def damaged(self) -> list[str]:
        """The names of contexts that were not as they were written when the store was opened."""
        return []

    def backup(self, folder: Path) -> int:
        """Copy everything to a new folder; the number of contexts. Raises Unsupported without a store."""
        raise Unsupported(f"a backup to {folder} needs a store, and this database keeps nothing: kvdb.connect(FOLDER)")

    def alive(self) -> list[Context]:
        """Every context that holds segments: those that are stored, and those that are borrowed or being dropped."""
        with self._lock:
            return [*self._contexts.values(), *self._borrowed]

    def contexts(self, prefix: str = "", limit: int | None = None, after: str = "") -> list[Context]:
        """The contexts in the order of their names: those that begin with `prefix` and come behind `after`, at most `limit`."""
        with self._lock:
            names = (name for name in self._contexts if name.startswith(prefix) and name > after)
            return [self._contexts[name] for name in (sorted(names) if limit is None else nsmallest(limit, names))]

    def drop(self, name: str) -> None:
        """Forget a context, and free the segments that nobody else holds. Raises NotFound."""
        with self._lock:
            context = self._find(name)
            self._remove(context)
            self._note_change(context)
            self._borrowed.append(context)
        self._release(context)

    def _release(self, context: Context) -> None:
        """Release a context that is borrowed, which counts as alive until then."""
        context.release()
        with self._lock:
            self._borrowed = [other for other in self._borrowed if other is not context]

    def _add(self, context: Context) -> None:
        """Make a context visible; called with the lock held."""
        self._contexts[context.name] = context
        if context.plain:
            self._trees.setdefault((context.spec.digest, context.salt), PrefixTree()).add(context.name, context.views)
        if (segment := context.chunk) is not None:
            self._chunks.setdefault(_text(context.spec, context.tokens, context.salt), Counter())[segment] += 1

    def _remove(self, context: Context) -> None:
        """Forget a context; called with the lock held."""
        del self._contexts[context.name]
        if context.plain:
            self._trees[context.spec.digest, context.salt].remove(context.name, context.views)
        if (segment := context.chunk) is not None:
            text = _text(context.spec, context.tokens, context.salt)
            self._chunks[text] -= Counter([segment])
            if not self._chunks[text]:
                del self._chunks[text]

    def _note_change(self, context: Context) -> None:
        """Note that a context came or went; called with the lock held."""
        if context.plain:
            self._changed.append(context)

    def _find(self, name: str) -> Context:
        if name not in self._contexts:
            known = ", ".join(repr(n) for n in sorted(self._contexts)[:5]) or "none"
            more = f" and {len(self._contexts) - 5:,} more" if len(self._contexts) > 5 else ""
            raise NotFound(f"no context is named {name!r}; stored are {known}{more} (see db.contexts())")
        return self._contexts[name]

    def _check_free(self, name: str) -> None:
        if name in self._contexts:
            raise AlreadyExists(f"a context named {name!r} is stored already; drop it first or choose another name")


def _text(spec: ModelSpec, tokens: Tokens, salt: str) -> tuple[str, str, bytes]:
    """The key of a chunk, equal for the same text of the same model under the same salt."""
    return spec.digest, salt, sha256(tokens.tobytes()).digest()


def files_of(contexts: Collection[Context]) -> set[SegmentFile]:
    """The files of contexts: of their segments and of recomputed tokens."""
    files = {view.segment.file for context in contexts for view in context.views}
    files.update(context.overlay.file for context in contexts if context.overlay is not None)
    return {file for file in files if file is not None}
