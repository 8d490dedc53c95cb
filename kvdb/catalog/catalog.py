"""The catalogue: contexts by name, chunks by their text, and a prefix tree for each spec."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush, nsmallest
from itertools import chain, count
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from kvdb.catalog.compaction.chains import Chain, Twins, chains_along, twins_along
from kvdb.catalog.compaction.holders import HeldViews, Holder, JointTree
from kvdb.catalog.compaction.partly_seen import PartlySeen, Trimmed, is_partial, partly_seen
from kvdb.catalog.compaction.relayout import Piece, Relayout
from kvdb.catalog.contexts.chunk_texts import ChunkTexts
from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.contexts.life import Life
from kvdb.catalog.contexts.prefix_tree import Place, PrefixTree, concatenate, place_behind, places
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views, release_views
from kvdb.errors import AlreadyExists, CapacityError, IntegrityError, NotFound, Unavailable, Unsupported
from kvdb.events import Events, Kind
from kvdb.types import BackedUp, ContextUpdate, ModelSpec, Retention, Tokens, UnknownFile

_holder_names = map(str, count(1))
CONTEXTS_AT_ONCE = 256
"""The most contexts that are changed while others wait."""

log = logging.getLogger(__name__)
# size: one noun, the catalogue of a database
EMPTY: Mapping[str, Any] = MappingProxyType({})


class Watcher(Protocol):
    """Whoever is told of the contexts of a catalogue, with its lock held: it calls the catalogue only later."""

    def came(self, context: StoredContext) -> None:
        """A context is stored from now on."""
        ...

    def used(self, contexts: Sequence[StoredContext], views: Views) -> None:
        """A session or an import reuses these views, with which these contexts end."""
        ...

    def went(self, context: StoredContext) -> None:
        """A context is not stored any more."""
        ...


class Text(NamedTuple):
    """The tokens of a context, int32 `[n]`, the digest of their model's spec, and its salt."""

    spec: str
    salt: str
    tokens: Tokens

    @classmethod
    def of(cls, context: StoredContext) -> Self:
        return cls(context.spec.digest, context.salt, context.tokens)


class Catalog:
    """Contexts and the segments they hold references to. It knows where segments take more space than their contexts need, and
    can replace them by others that hold the same tokens. Thread-safe.

    watcher: None where nobody is told of the contexts. events: told of those that go by themselves, by whoever lets them go.
    on_disk: whether it keeps every segment in a file of its own.
    """

    on_disk = False

    def __init__(self) -> None:
        self._contexts: dict[str, StoredContext] = {}
        self._trees: dict[tuple[str, str], PrefixTree] = {}
        self._chunks = ChunkTexts()
        self._borrowed: list[StoredContext] = []
        self._ending: dict[Segment, set[str]] = {}  # the names of the contexts whose last segment it is
        self._expiring: list[tuple[float, str]] = []  # a heap; some were changed or dropped meanwhile
        self._changed: list[StoredContext] = []
        self._lock = Lock()
        self.watcher: Watcher | None = None
        self.events = Events()
        self._held: dict[Holder, HeldViews] = {}
        self._held_by_name: dict[str, HeldViews] = {}
        self._held_trees: dict[tuple[str, str], PrefixTree] = {}
        self._changed_texts: list[Text] = []  # of holders
        self._partial: dict[str, StoredContext] = {}

    def retention(self, asked: Retention) -> Retention:
        """What the caller asks of a new context, with the durability that it will have. Raises Unsupported for more than a
        database without a store can promise."""
        if asked.durability not in {None, "memory"}:
            level = f"durability={asked.durability!r}"
            raise Unsupported(f"{level} needs a store, and this database keeps nothing: kvdb.connect(FOLDER)")
        return replace(asked, durability="memory")

    def publish(self, context: StoredContext) -> StoredContext:
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

    def peek(self, name: str) -> StoredContext | None:
        """The context of that name, if there is one."""
        with self._lock:
            return self._contexts.get(name)

    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> Views:
        """Views of the longest prefix of `tokens` that is stored under that salt. The caller owns one reference to each view's
        segment."""
        with self._lock:
            tree = self._trees.get((spec.digest, salt))
            views = tree.match(tokens) if tree else ()
            for view in views:
                view.segment.retain()
            return views

    def use(self, views: Views) -> list[StoredContext]:
        """Count a use of the contexts that end with one of these views. Returns them."""
        with self._lock:
            names = {name for view in views for name in self._ending.get(view.segment, ())}
            contexts = [self._contexts[name] for name in names]
            for context in contexts:
                context.life.note_use()
            if self.watcher is not None:
                self.watcher.used(contexts, views)
        return contexts

    def update(self, name: str, change: ContextUpdate) -> StoredContext:
        """Change how long a context is kept, what is noted of it, or its name. Returns it as it is then. Raises NotFound, and
        AlreadyExists for a name that is taken."""
        with self._lock:
            context = self._find(name)
            if change.name not in {None, name}:
                self._check_free(str(change.name))
            return self._set(context, change.name or name, context.life.changed(change))

    def drop_expired(self) -> int:
        """Drop the contexts whose time is over, pinned ones too. Returns how many went; one that cannot be dropped is tried
        again."""
        if not self._expiring or self._expiring[0][0] > time.time():
            return 0
        due, gone = self._take_expired(), 0
        for expires, name in due:
            try:
                self.drop(name)
                gone += 1
                self.events.tell(Kind.EXPIRED, context=name)
            except NotFound:  # somebody dropped it meanwhile
                pass
            except (CapacityError, IntegrityError, Unavailable) as error:
                log.error("context %r is over and cannot be dropped: %s", name, error)
                with self._lock:
                    heappush(self._expiring, (expires, name))
        return gone

    def chunk(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> Views:
        """The views of a chunk of exactly these tokens that is stored under that salt, none where there is none. The caller owns
        a reference to the segment of each."""
        with self._lock:
            views = self._chunks.find(spec.digest, salt, tokens)
            for view in views:
                view.segment.retain()
            return views

    def get(self, name: str) -> StoredContext:
        """Raises NotFound."""
        with self._lock:
            return self._find(name)

    def acquire(self, name: str) -> StoredContext:
        """A context for the caller, who owns a reference to each view's segment, and a share of the overlay, until
        `StoredContext.release`. Raises NotFound."""
        with self._lock:
            context = self._find(name)
            overlay = None if context.overlay is None else context.overlay.share()
            for view in context.views:
                view.segment.retain()
            return replace(context, overlay=overlay, beside=None)

    @contextmanager
    def borrow(self, name: str) -> Iterator[StoredContext]:
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

    def backup(self, folder: Path, *, link: bool = False) -> BackedUp:
        """Copy everything to a new folder, or link it. Raises Unsupported without a store."""
        what = "hard links" if link else "a backup"
        raise Unsupported(f"{what} to {folder} needs a store, and this database keeps nothing: kvdb.connect(FOLDER)")

    def unknown_files(self, *, remove: bool = False) -> list[UnknownFile]:  # noqa: ARG002  # what a store does
        """The files of a store that its catalogue does not know."""
        return []

    def alive(self) -> list[StoredContext]:
        """Every context that holds segments: those that are stored, and those that are borrowed or being dropped."""
        with self._lock:
            return [*self._contexts.values(), *self._borrowed]

    @property
    def count(self) -> int:
        """How many contexts are stored."""
        return len(self._contexts)

    def contexts(
        self, prefix: str = "", limit: int | None = None, after: str = "", metadata: Mapping[str, Any] = EMPTY
    ) -> list[StoredContext]:
        """The contexts in the order of their names: those that begin with `prefix` and come behind `after`, at most `limit`.
        metadata: only those of which all of it is noted."""
        with self._lock:
            names = (name for name in self._contexts if name.startswith(prefix) and name > after)
            if metadata:
                lives = {name: self._contexts[name].life.metadata for name in names}
                names = (name for name, noted in lives.items() if {**noted, **metadata} == noted)
            return [self._contexts[name] for name in (sorted(names) if limit is None else nsmallest(limit, names))]

    def drop(self, *names: str) -> None:
        """Forget contexts, all or none, and free the segments that nobody else holds. Raises NotFound."""
        with self._lock:
            contexts = [self._find(name) for name in dict.fromkeys(names)]
            for context in contexts:
                self._remove(context)
                self._note_change(context)
                self._borrowed.append(context)
        for context in contexts:
            self._release(context)

    def hold(self, holder: Holder) -> bool:
        """Lay space out for what a holder stands on now too, in place of what it stood on before, until `let_go`; its references
        last as long. Returns whether contexts do not need everything of either, so that there may be something to give back."""
        with self._lock:
            changed = self._let_go(holder)
            held = HeldViews(next(_holder_names), holder, holder.views)
            self._held[holder] = self._held_by_name[held.name] = held
            self._held_trees.setdefault(_key(holder), PrefixTree()).add(held.name, held.views)
            return self._note_held(held) or changed

    def let_go(self, holder: Holder) -> bool:
        """Undo `hold`, before the holder's references are released. Returns whether there may be something to give back."""
        with self._lock:
            return self._let_go(holder)

    def holds(self, holder: Holder) -> bool:
        """Whether it is between `hold` and `let_go`."""
        return holder in self._held

    def holders(self, text: Text, relayout: Relayout) -> list[Holder]:
        """The holders that stand on the first of the pieces."""
        with self._lock:
            tree = self._held_trees.get((text.spec, text.salt))
            return [] if tree is None else [self._held_by_name[name].holder for name in _names_at(tree, relayout)]

    def ends_at(self, spec: ModelSpec, salt: str, views: Views) -> bool:
        """Whether no context sees more of the last segment of a path than the path does."""
        with self._lock:
            last = views[-1]
            alike = self._tree(spec.digest, salt).alike(place_behind(views[:-1]), last.segment.ids.first)
            return last.segment in alike and alike[last.segment].visible == last.visible

    def texts(self) -> Iterator[Text]:
        """The texts of all contexts that are found by them."""
        for context in self.contexts():
            if context.plain:
                yield Text.of(context)
        with self._lock:
            held = [held for held in self._held.values() if self._is_held_only(held)]
        for one in held:
            yield _text_of(one)

    def take_changed(self) -> Iterator[Text]:
        """The texts along which contexts came or went since they were last taken."""
        with self._lock:
            changed, self._changed = self._changed, []
            texts, self._changed_texts = self._changed_texts, []
        return chain(map(Text.of, changed), texts)

    def chains(self, text: Text) -> list[Chain]:
        """The chains that a text goes through, as far as it is stored. The caller owns a reference to each piece's segment."""
        with self._lock:
            chains = chains_along(self._joint(text), text.tokens)
            for segment in (segment for one in chains for segment in one.segments):
                segment.retain()
            return chains

    def twins(self, text: Text) -> Twins | None:
        """Two segments on the way of a text that begin with the same tokens at the same place, None where every token is stored
        once. The caller owns a reference to each segment."""
        with self._lock:
            twins = twins_along(self._joint(text), text.tokens)
            for segment in () if twins is None else twins.segments:
                segment.retain()
            return twins

    def replace(self, text: Text, relayout: Relayout) -> None:
        """Let every context that sees the pieces see the targets instead, a few contexts at a time. text: goes through the
        pieces. The caller owns a reference to each segment. Raises what writing them may raise; then some contexts see the pieces
        still."""
        names = self._seeing(text, relayout)
        for start in range(0, len(names), CONTEXTS_AT_ONCE):
            self._replace(names[start : start + CONTEXTS_AT_ONCE], relayout)

    def partly_seen(self) -> list[PartlySeen]:
        """Segments that blended contexts alone hold, and hardly need. The caller owns a reference to each."""
        with self._lock:
            found = partly_seen(self._partial.values())
            for one in found:
                one.segment.retain()
            return found

    def cold(self, before: float) -> Iterator[tuple[Text, Place, Piece]]:
        """Segments in no format that only contexts hold of which none was used since that time, with the place where each hangs,
        and a text that goes through it; those behind others first. The caller owns a reference to each."""
        for name in [context.name for context in self.contexts()]:
            context = self._contexts.get(name)
            if context is None or not context.plain or context.life.used >= before:
                continue
            for place, view in reversed(list(places(context.views))):
                with self._lock:
                    seeing = self._tree(context.spec.digest, context.salt).alike(place, view.segment.ids.first).get(view.segment)
                    lives = [] if seeing is None else [self._contexts[name].life for name in seeing.names]
                    used = any(life.used >= before for life in lives)
                    if seeing is None or used or view.segment.format or view.segment.references != len(lives):
                        continue
                    view.segment.retain()
                yield Text.of(context), place, Piece(view.segment, seeing.visible)

    def trim(self, one: PartlySeen, new: Segment) -> None:
        """Let blended contexts see another segment that holds what they see. The caller owns a reference to both. Raises what
        writing it may raise."""
        self._replace(one.names, Trimmed(one.segment, new))

    def _take_expired(self) -> list[tuple[float, str]]:
        """When the time of contexts was over, and their names; they are noted no more."""
        with self._lock:
            due = []
            while self._expiring and self._expiring[0][0] <= time.time():
                expires, name = heappop(self._expiring)
                if name in self._contexts and self._contexts[name].life.expires == expires:
                    due.append((expires, name))
            return due

    def _release(self, context: StoredContext) -> None:
        """Release a context that is borrowed, which counts as alive until then."""
        context.release()
        with self._lock:
            self._borrowed = [other for other in self._borrowed if other is not context]

    def _set(self, context: StoredContext, name: str, life: Life) -> StoredContext:
        """Give a context another name and life; called with the lock held."""
        self._remove(context)
        changed = replace(context, name=name, life=life)
        self._add(changed)
        return changed

    def _note(self, context: StoredContext) -> None:
        """Note what a context ends with and when it is to be dropped, and tell the watcher; called with the lock held."""
        if context.views:
            self._ending.setdefault(context.views[-1].segment, set()).add(context.name)
        if context.life.expires is not None:
            heappush(self._expiring, (context.life.expires, context.name))
        if self.watcher is not None:
            self.watcher.came(context)

    def _unnote(self, context: StoredContext) -> None:
        """Undo `_note`; called with the lock held."""
        if context.views:
            last = context.views[-1].segment
            self._ending[last].remove(context.name)
            if not self._ending[last]:
                del self._ending[last]
        if self.watcher is not None:
            self.watcher.went(context)

    def _add(self, context: StoredContext) -> None:
        """Make a context visible; called with the lock held."""
        self._contexts[context.name] = context
        self._note(context)
        if context.plain:
            self._trees.setdefault((context.spec.digest, context.salt), PrefixTree()).add(context.name, context.views)
        if views := context.chunk:
            self._chunks.add(context.spec.digest, context.salt, views)
        if is_partial(context):
            self._partial[context.name] = context

    def _remove(self, context: StoredContext) -> None:
        """Forget a context; called with the lock held."""
        del self._contexts[context.name]
        self._unnote(context)
        if context.plain:
            self._trees[context.spec.digest, context.salt].remove(context.name, context.views)
        if views := context.chunk:
            self._chunks.remove(context.spec.digest, context.salt, views)
        self._partial.pop(context.name, None)

    def _note_change(self, context: StoredContext) -> None:
        """Note that a context came or went; called with the lock held."""
        if context.plain:
            self._changed.append(context)

    def _find(self, name: str) -> StoredContext:
        if name not in self._contexts:
            folder, slash, _ = name.partition("/")  # of a server's tenant, who is told of none but its own
            near = sorted(other for other in self._contexts if other.startswith(folder + slash) or not slash)
            known = ", ".join(map(repr, near[:5])) or "none"
            more = f" and {len(near) - 5:,} more" if len(near) > 5 else ""
            raise NotFound(f"no context is named {name!r}; stored are {known}{more} (see db.contexts(), kvdb ls)")
        return self._contexts[name]

    def _check_free(self, name: str) -> None:
        if name in self._contexts:
            raise AlreadyExists(f"a context named {name!r} is stored already; drop it first (kvdb drop) or choose another name")

    def _seeing(self, text: Text, relayout: Relayout) -> list[str]:
        """The names of the contexts that see the first of the pieces."""
        with self._lock:
            return _names_at(self._tree(text.spec, text.salt), relayout)

    def _replace(self, names: Sequence[str], relayout: Relayout | Trimmed) -> None:
        """`replace` for these contexts, as far as they are there."""
        self._swap(self._rewritten(names, relayout))

    def _rewritten(self, names: Sequence[str], relayout: Relayout | Trimmed) -> list[tuple[StoredContext, StoredContext]]:
        """Contexts as they are and as they are to be, with a reference to each segment that the latter see."""
        pairs = []
        with self._lock:
            for name in names:
                context = self._contexts.get(name)
                views = () if context is None else relayout.views(context.views)
                if context is not None and views != context.views:
                    for view in views:
                        view.segment.retain()
                    pairs.append((context, replace(context, layout=replace(context.layout, views=views))))
        return pairs

    def _swap(self, pairs: Sequence[tuple[StoredContext, StoredContext]]) -> None:
        """Put the second of each pair in the place of the first, if that is there still."""
        with self._lock:
            gone = [self._put_in_place(old, new) for old, new in pairs]
        for context in gone:
            release_views(context.views)

    def _put_in_place(self, old: StoredContext, new: StoredContext) -> StoredContext:
        """`_swap` one, with the lock held. Returns the one whose references are to be released."""
        if self._contexts.get(old.name) is not old:
            return new
        self._remove(old)
        self._add(new)
        return old

    def _tree(self, spec: str, salt: str) -> PrefixTree:
        return self._trees.get((spec, salt)) or PrefixTree()

    def _joint(self, text: Text) -> PrefixTree:
        """What contexts see and holders stand on; called with the lock held."""
        contexts, holders = self._tree(text.spec, text.salt), self._held_trees.get((text.spec, text.salt))
        return contexts if holders is None else JointTree(contexts, holders)

    def _let_go(self, holder: Holder) -> bool:
        """`let_go`, with the lock held; of what is not held too."""
        held = self._held.pop(holder, None)
        if held is None:
            return False
        del self._held_by_name[held.name]
        self._held_trees[_key(holder)].remove(held.name, held.views)
        return self._note_held(held)

    def _note_held(self, held: HeldViews) -> bool:
        """Note that a holder comes or goes, if contexts do not need all of what it stands on. Returns whether they do not."""
        only = self._is_held_only(held)
        if only:
            self._changed_texts.append(_text_of(held))
        return only

    def _is_held_only(self, held: HeldViews) -> bool:
        return not self._tree(*_key(held.holder)).shows(held.views)


def _key(holder: Holder) -> tuple[str, str]:
    return holder.spec.digest, holder.salt


def _text_of(held: HeldViews) -> Text:
    return Text(*_key(held.holder), concatenate(held.views))


def _names_at(tree: PrefixTree, relayout: Relayout) -> list[str]:
    """The names that a tree knows of whoever sees the first of the pieces."""
    first = relayout.pieces[0].segment
    contexts = tree.alike(relayout.place, first.ids.first).get(first)
    return [] if contexts is None else list(contexts.names)
