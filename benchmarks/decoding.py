"""Decode steps of a workload's layer as users get them: `session.attend`, by native code while its course goes on."""

from __future__ import annotations

from time import perf_counter

import numpy as np

import kvdb._native as _native
from benchmarks.layer import Layer
from indexes.base import Index
from indexes.retrieval import Exact, Retrieval
from query_optimizer.query_options import Hints, QueryOptions


class Decoding:
    """One way to decode in a session of its own, which grows by a token a step.

    steps, native: how many were taken, and how many of these by native code alone.
    """

    def __init__(self, layer: Layer, index: Index | None, retrieval: Retrieval) -> None:
        """index: searched whatever the optimizer thinks of it; None reads everything, whatever the retrieval."""
        self._layer = layer
        self._index = index
        self._options = QueryOptions(Exact()) if index is None else QueryOptions(retrieval, hints=Hints(index=index.kind))
        self._session = layer.session()
        self.steps = self.native = 0

    def step(self, q: np.ndarray) -> float:
        """Seconds of one step. q: `[q_heads, 1, head_dim]` in the layer's dtype; its token has a stored one's key and value."""
        at = self.steps * 97 % self._layer.tokens
        k, v = (np.ascontiguousarray(x[:, at : at + 1]) for x in (self._layer.workload.k, self._layer.workload.v))
        if self._index is not None:
            self._layer.offer(self._index)
        self.steps += 1
        started = perf_counter()
        out = self._session.step(0, q, k, v, self._options, None)
        seconds = perf_counter() - started
        if out is not None:
            self.native += 1
            return seconds
        self._session.attend(0, q, k, v, self._options)
        return perf_counter() - started


def read_seconds(layer: Layer) -> float:
    """Seconds that all threads take to read the layer's keys and values once, which no attention over all of them can beat.
    Nothing of anything else is in the caches then."""
    started = perf_counter()
    _native.read_blocks(layer.layout.native, layer.blocks.table)
    return perf_counter() - started
