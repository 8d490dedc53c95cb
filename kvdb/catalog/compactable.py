"""A catalogue whose contexts can go over to other segments that hold the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from kvdb.catalog.catalog import Catalog
from kvdb.catalog.chains import Chain, Twins, chains_along, twins_along
from kvdb.catalog.context import Context
from kvdb.catalog.layout import Layout
from kvdb.catalog.prefix_tree import PrefixTree, place_behind
from kvdb.catalog.relayout import Relayout
from kvdb.catalog.segment_view import Views, release_views
from kvdb.types import ModelSpec, Tokens

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

    def take_changed(self) -> Iterator[Text]:
        """The texts along which contexts came or went since they were last taken."""
        with self._lock:
            changed, self._changed = self._changed, []
        return map(Text.of, changed)

    def chains(self, text: Text) -> list[Chain]:
        """The chains that a text goes through, as far as it is stored. The caller owns a reference to each piece's segment."""
        with self._lock:
            chains = chains_along(self._tree(text.spec, text.salt), text.tokens)
            for segment in (segment for chain in chains for segment in chain.segments):
                segment.retain()
            return chains

    def twins(self, text: Text) -> Twins | None:
        """Two segments on the way of a text that begin with the same tokens at the same place, None where every token is stored
        once. The caller owns a reference to each segment."""
        with self._lock:
            twins = twins_along(self._tree(text.spec, text.salt), text.tokens)
            for segment in () if twins is None else twins.segments:
                segment.retain()
            return twins

    def replace(self, text: Text, relayout: Relayout) -> None:
        """Let every context that sees the pieces see the targets instead, a few contexts at a time. text: goes through the
        pieces. The caller owns a reference to each segment. Raises what writing them may raise; then some contexts see the pieces
        still."""
        with self._lock:
            first = relayout.pieces[0].segment
            contexts = self._tree(text.spec, text.salt).alike(relayout.place, first.ids.first).get(first)
            names = [] if contexts is None else list(contexts.names)
        for start in range(0, len(names), CONTEXTS_AT_ONCE):
            self._replace(names[start : start + CONTEXTS_AT_ONCE], relayout)

    def _replace(self, names: Sequence[str], relayout: Relayout) -> None:
        """`replace` for these contexts, as far as they are there."""
        self._swap(self._rewritten(names, relayout))

    def _rewritten(self, names: Sequence[str], relayout: Relayout) -> list[tuple[Context, Context]]:
        """Contexts as they are and as they are to be, with a reference to each segment that the latter see."""
        pairs = []
        with self._lock:
            for name in names:
                context = self._contexts.get(name)
                views = () if context is None else relayout.views(context.views)
                if context is not None and views != context.views:
                    for view in views:
                        view.segment.retain()
                    pairs.append((context, replace(context, layout=Layout.contiguous(views))))
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
