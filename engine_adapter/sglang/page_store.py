"""The pages of HiCache's chains in kvdb: how many are there, read them, add to them."""

from collections.abc import Sequence

from torch import Tensor

from engine_adapter.contexts import ModelContexts
from engine_adapter.sglang.host_pages import HostPages
from engine_adapter.sglang.keys import page_ids


class PageStore:
    """Chains of pages in a database. Thread-safe, as the client is.

    contexts: of the engine's spec. salt: what the KV differs in beside its pages' keys, such as a rank's share of the heads.
    pages: the memory that pages are read into and handed over from. Methods raise what those of `kvdb.Client` and `kvdb.Session`
    raise, and InvalidArgument for what is no key.
    """

    def __init__(self, contexts: ModelContexts, salt: str, pages: HostPages) -> None:
        self._contexts = contexts
        self._salt = salt
        self._pages = pages
        self._page_size = pages.page_size

    def count(self, keys: Sequence[str]) -> int:
        """How many pages from the first on are stored."""
        return self._contexts.find(page_ids(keys, self._page_size), self._salt) // self._page_size

    def read(self, keys: Sequence[str], skip: int, indices: Tensor) -> int:
        """Write the stored pages of a chain into the pool, but the first `skip`. indices: where each token of these pages goes.
        Returns how many pages were there, and written."""
        with self._contexts.open(page_ids(keys, self._page_size), self._salt) as sequence:
            start = skip * self._page_size
            found = max(0, sequence.reused // self._page_size - skip)
            for first, tokens in self._pages.runs(indices[: found * self._page_size]):
                sequence.read(range(sequence.spec.layers), start, start + tokens, out=self._pages.views(first, tokens))
                start += tokens
        return found

    def write(self, keys: Sequence[str], skip: int, indices: Tensor) -> bool:
        """Store the pages of a chain behind the first `skip`, which are stored already. Returns whether all are there now: a
        chain of which a part was evicted takes nothing that lies behind the gap."""
        ids = page_ids(keys, self._page_size)
        if self._contexts.find(ids, self._salt) >= len(ids):
            return True
        with self._contexts.open(ids, self._salt) as sequence:
            start = sequence.reused // self._page_size * self._page_size
            if start < skip * self._page_size:
                return False
            sequence.truncate(start)
            for first, tokens in self._pages.runs(indices[start - skip * self._page_size :]):
                for layer, (k, v) in enumerate(self._pages.views(first, tokens)):
                    sequence.update(layer, k, v, start=start)
                start += tokens
            self._contexts.keep(sequence, ids, self._salt)
        return True

    def of(self, page: Tensor) -> "PageStore":
        """The same chains, read into and written from one flat page outside the pool."""
        return PageStore(self._contexts, self._salt, self._pages.one(page))
