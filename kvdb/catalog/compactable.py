"""A catalogue whose contexts can go over to other segments that hold the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import NamedTuple, Self

from kvdb.catalog.catalog import Catalog
from kvdb.catalog.chains import Chain, Twins, chains_along, twins_along
from kvdb.catalog.context import Context
from kvdb.catalog.holders import Held, Holder, JointTree
from kvdb.catalog.partly_seen import PartlySeen, Trimmed, is_partial, partly_seen
from kvdb.catalog.prefix_tree import Place, PrefixTree, concatenate, place_behind, places
from kvdb.catalog.relayout import Piece, Relayout
from kvdb.catalog.segment import Segment
from kvdb.catalog.segment_view import Views, release_views
from kvdb.types import ModelSpec, Tokens

_holder_names = map(str, count(1))
CONTEXTS_AT_ONCE = 256
"""The most contexts that are changed while others wait."""


class Text(NamedTuple):
    """The tokens of a context, int32 `[n]`, the digest of their model's spec, and its salt."""

    spec: str
    salt: str
    tokens: Tokens

    @classmethod
    def of(cls, context: Context) -> Self:
        return cls(context.spec.digest, context.salt, context.tokens)


class CompactableCatalog(Catalog):
    """A catalogue that knows where segments take more space than their contexts need, and can replace them. Thread-safe.

    on_disk: whether it keeps every segment in a file of its own.
    """

    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[Holder, Held] = {}
        self._held_by_name: dict[str, Held] = {}
        self._held_trees: dict[tuple[str, str], PrefixTree] = {}
        self._changed_texts: list[Text] = []  # of holders
        self._partial: dict[str, Context] = {}

    def hold(self, holder: Holder) -> bool:
        """Lay space out for what a holder stands on now too, in place of what it stood on before, until `let_go`; its references
        last as long. Returns whether contexts do not need everything of either, so that there may be something to give back."""
        with self._lock:
            changed = self._let_go(holder)
            held = Held(next(_holder_names), holder, holder.views)
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

    def _add(self, context: Context) -> None:
        super()._add(context)
        if is_partial(context):
            self._partial[context.name] = context

    def _remove(self, context: Context) -> None:
        super()._remove(context)
        self._partial.pop(context.name, None)

    def _seeing(self, text: Text, relayout: Relayout) -> list[str]:
        """The names of the contexts that see the first of the pieces."""
        with self._lock:
            return _names_at(self._tree(text.spec, text.salt), relayout)

    def _replace(self, names: Sequence[str], relayout: Relayout | Trimmed) -> None:
        """`replace` for these contexts, as far as they are there."""
        self._swap(self._rewritten(names, relayout))

    def _rewritten(self, names: Sequence[str], relayout: Relayout | Trimmed) -> list[tuple[Context, Context]]:
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

    def _swap(self, pairs: Sequence[tuple[Context, Context]]) -> None:
        """Put the second of each pair in the place of the first, if that is there still."""
        with self._lock:
            gone = [self._put_in_place(old, new) for old, new in pairs]
        for context in gone:
            release_views(context.views)

    def _put_in_place(self, old: Context, new: Context) -> Context:
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

    def _note_held(self, held: Held) -> bool:
        """Note that a holder comes or goes, if contexts do not need all of what it stands on. Returns whether they do not."""
        only = self._is_held_only(held)
        if only:
            self._changed_texts.append(_text_of(held))
        return only

    def _is_held_only(self, held: Held) -> bool:
        return not self._tree(*_key(held.holder)).shows(held.views)


def _key(holder: Holder) -> tuple[str, str]:
    return holder.spec.digest, holder.salt


def _text_of(held: Held) -> Text:
    return Text(*_key(held.holder), concatenate(held.views))


def _names_at(tree: PrefixTree, relayout: Relayout) -> list[str]:
    """The names that a tree knows of whoever sees the first of the pieces."""
    first = relayout.pieces[0].segment
    contexts = tree.alike(relayout.place, first.ids.first).get(first)
    return [] if contexts is None else list(contexts.names)
