"""What windows let go of is noted as it comes: the new keys and values of their layers, for the time of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine_adapter.transformers.layers.base import Part
from engine_adapter.transformers.own.kept_model import KeptModel, columns_of


class Recording:
    """The tokens that come into a cache.

    cache: where they come. begin: the number of columns that it held before.
    """

    def __init__(self, kept: KeptModel, cache: Any) -> None:
        self._kept = kept
        self.cache = cache
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.begin = 0

    def taken(self, row: int, stop: int) -> list[tuple[Part, ...]]:
        """What each layer keeps of columns [begin, stop) of a row. States are those at the cache's end."""
        n = stop - self.begin
        taken = []
        for number, (kind, layer) in enumerate(zip(self._kept.kinds, self.cache.layers, strict=True)):
            if kind.windowed is None:
                taken.append(kind.taken(layer, row, self.begin, stop))
                continue
            keys, values = (torch.cat([pair[i][row] for pair in self._seen[number]], -2)[:, :n] for i in (0, 1))
            end = columns_of(self.cache)
            rest = kind.taken(layer, row, end, end)[1:]
            taken.append((kind.windowed.form.joined(keys, values), *rest))
        return taken

    def forget(self) -> None:
        """Begin anew behind what the cache holds now."""
        self.begin = columns_of(self.cache)
        self._seen = {number: [] for number, kind in enumerate(self._kept.kinds) if kind.windowed is not None}

    def note(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Note new keys and values of a layer, `[rows, heads, n, dim]`."""
        self._seen[number].append((keys, values))


@contextmanager
def recording(kept: KeptModel, cache: Any) -> Iterator[Recording]:
    """A Recording of a cache. Its layers are as they were at the end."""
    seen = Recording(kept, cache)
    seen.forget()
    recorded = [number for number, kind in enumerate(kept.kinds) if kind.windowed is not None]
    for number in recorded:
        cache.layers[number].update = _noting(cache.layers[number].update, seen, number)
    try:
        yield seen
    finally:
        for number in recorded:
            del cache.layers[number].update


def _noting(update: Any, seen: Recording, number: int) -> Any:
    def noting(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.note(number, key_states, value_states)
        return update(key_states, value_states, *args, **kwargs)

    return noting
