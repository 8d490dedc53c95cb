"""Chunks by their text.

A text is looked for by its SHA-256, which is made of the stored chunks of that length when one of them is first asked for: many
stores hold contexts that nobody ever lays out as chunks, and opening these takes no hashing.
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from typing import TypeAlias

from kvdb.catalog.contexts.prefix_tree import concatenate
from kvdb.catalog.segments.segment_view import Views
from kvdb.types import Tokens

Length: TypeAlias = tuple[str, str, int]
"""The digest of a model's spec, a salt, and a number of tokens."""


class ChunkTexts:
    """The views of chunks, each as often as contexts name it. Not thread-safe: the catalogue locks."""

    def __init__(self) -> None:
        self._alike: dict[Length, _SameLength] = {}

    def add(self, spec: str, salt: str, views: Views) -> None:
        """Add a chunk that is stored under a salt. spec: the digest of its model's spec."""
        self._alike.setdefault(_length(spec, salt, views), _SameLength()).add(views)

    def remove(self, spec: str, salt: str, views: Views) -> None:
        """Undo one `add`."""
        length = _length(spec, salt, views)
        if not self._alike[length].remove(views):
            del self._alike[length]

    def find(self, spec: str, salt: str, tokens: Tokens) -> Views:
        """The chunk of exactly these tokens, int32 `[n]`, that was added first of those that are there; empty for none."""
        alike = self._alike.get((spec, salt, len(tokens)))
        return () if alike is None else alike.find(tokens)


class _SameLength:
    """The chunks of one model, salt and length. by_text: None until somebody looks for one."""

    def __init__(self) -> None:
        self._named = Counter[Views]()  # how many contexts name each
        self._by_text: dict[bytes, dict[Views, None]] | None = None

    def add(self, views: Views) -> None:
        self._named[views] += 1
        if self._by_text is not None and self._named[views] == 1:
            self._note((views,))

    def remove(self, views: Views) -> bool:
        """Undo one `add`. Returns whether any chunk is left."""
        self._named[views] -= 1
        if not self._named[views]:
            del self._named[views]
            if self._by_text is not None:
                text = _text(concatenate(views))
                del self._by_text[text][views]
                if not self._by_text[text]:
                    del self._by_text[text]
        return bool(self._named)

    def find(self, tokens: Tokens) -> Views:
        if self._by_text is None:
            self._by_text = {}
            self._note(self._named)
        return next(iter(self._by_text.get(_text(tokens), ())), ())

    def _note(self, chunks: Iterable[Views]) -> None:
        assert self._by_text is not None
        for views in chunks:
            self._by_text.setdefault(_text(concatenate(views)), {})[views] = None


def _length(spec: str, salt: str, views: Views) -> Length:
    return spec, salt, sum(view.visible for view in views)


def _text(tokens: Tokens) -> bytes:
    return sha256(tokens.tobytes()).digest()
