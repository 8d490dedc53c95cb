"""The layers of DeepSeek-V4 that keep compressed streams of the text beside a window: DeepseekV4HCACache, DeepseekV4CSACache.

A stream has an entry for every `compress_rate` tokens; tokens that do not fill one yet wait in a buffer. Both follow from all
tokens before a position and from no later one, so they are a state: streams that grow, and a buffer of any length.
"""

from collections.abc import Sequence
from typing import Any, cast

import kvdb
from engine_adapter.transformers.layers.attention import AttentionLayer
from engine_adapter.transformers.layers.base import Part, Snapshot, together
from engine_adapter.transformers.layers.states import described

GROWING = ("compressed_kv", "buffer_kv", "buffer_gate")
"""One entry, or token, each row of their first dimension."""
OVERLAP = ("overlap_kv", "overlap_gate")
"""What the next window reads of the last full one."""


class CompressedLayer:
    """A window whose values are its keys, and what the compressors keep.

    Columns of padding before a row's tokens shift the windows that are compressed together, so padded rows are not alike to
    others.
    """

    padded = False

    def __init__(self, attention: AttentionLayer, trial: Any) -> None:
        self._attention = attention
        self.windowed = attention.windowed
        self._names = tuple(trial.compressed_kv)
        self.descriptions = (*attention.descriptions, described_streams(trial))

    def taken(self, layer: Any, row: int, start: int, stop: int) -> tuple[Part, ...]:
        return (*self._attention.taken(layer, row, start, stop), streams_of(layer, row))

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int) -> None:
        self._attention.filled(layer, [row[:1] for row in rows], columns)
        layer.values = layer.keys
        snapshots = [cast(Snapshot, row[1]) for row in rows]
        for name in self._names:
            for what in (*GROWING, *OVERLAP):
                if f"{what}.{name}" in snapshots[0]:
                    getattr(layer, what)[name] = together([snapshot[f"{what}.{name}"] for snapshot in snapshots])
            layer.entry_count[name] = layer.compressed_kv[name].shape[1]
            if hasattr(layer, "overlap_kv") and not layer.overlap_kv[name].shape[1]:
                layer.overlap_kv[name] = layer.overlap_gate[name] = None


def streams_of(layer: Any, row: int) -> Snapshot:
    """The streams, buffers and overlaps of a row; an overlap that there is none of yet has no tokens."""
    taken = {f"{what}.{name}": states[row] for what in GROWING for name, states in getattr(layer, what).items()}
    for name in getattr(layer, "overlap_kv", ()):
        for what in OVERLAP:
            states = getattr(layer, what)[name]
            like = layer.compressed_kv[name]
            taken[f"{what}.{name}"] = like.new_zeros(0, like.shape[2]) if states is None else states[row]
    return taken


def described_streams(trial: Any) -> kvdb.State:
    """The description of what a layer that has read some tokens keeps in streams."""
    streams = streams_of(trial, 0)
    return described(streams, free=frozenset(streams))
