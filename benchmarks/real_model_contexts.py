"""The stored contexts of `benchmarks/real_model.py`: computed once, kept in a folder, and imported into each database."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

import kvdb
from benchmarks.real_model_texts import Passage, Subject
from benchmarks.real_model_ways import Way, kinds_of
from kvdb.config import Config

NAME = "context"
PIECE_TOKENS = 512
LEARNING_KINDS = ("flat", "quantized")
"""Indexes of a database whose ways of answering are chosen for it: the first two that kvdb builds by itself."""
Kv = npt.NDArray[np.float32]


def keys_and_values(subject: Subject, passage: Passage, cache: Path | None) -> Kv:
    """The KV of a passage's context, computed by the plain model: float32 `[layers, 2, kv_heads, n, head_dim]`, keys after RoPE.

    cache: a folder that keeps it, None for none.
    """
    ids = np.array(passage.context, np.int32)
    label = hashlib.sha256(subject.name.encode() + ids.tobytes()).hexdigest()[:16]
    path = None if cache is None else cache / f"kv-{label}.npy"
    if path is not None and path.exists():
        found: Kv = np.load(path)
        return found
    computed = _prefill(subject, torch.from_numpy(ids.astype(np.int64)))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".part.npy")
        np.save(written, computed)
        written.rename(path)
    return computed


def _prefill(subject: Subject, ids: torch.Tensor) -> Kv:
    cache, began = DynamicCache(), time.perf_counter()
    decoder: Any = subject.model.get_decoder()
    with torch.no_grad():
        for start in range(0, len(ids), PIECE_TOKENS):
            decoder(input_ids=ids[None, start : start + PIECE_TOKENS], past_key_values=cache, use_cache=True)
            done = min(start + PIECE_TOKENS, len(ids))
            say(f"prefill {subject.name}: {done:,} of {len(ids):,} tokens, {time.perf_counter() - began:.0f} s")
    layers: Any = cache.layers
    return np.stack([np.stack([layer.keys[0].numpy(), layer.values[0].numpy()]) for layer in layers])


class Databases:
    """A database for all ways that learn nothing, and one of its own for each that does; all hold the same context."""

    def __init__(self, spec: kvdb.ModelSpec, passage: Passage, kv: Kv, config: Config | None = None) -> None:
        self.spec = spec
        self._ids = np.array(passage.context, np.int32)
        self._kv = kv
        self._config = config
        self._opened: dict[str, kvdb.Client] = {}

    def prepare(self, chosen: list[Way]) -> None:
        """Open what is missing for these ways, with their indexes."""
        for way in chosen:
            if self._place(way) not in self._opened:
                kinds = LEARNING_KINDS if way.learns else kinds_of([other for other in chosen if not other.learns])
                self._opened[self._place(way)] = self._open(kinds)

    def __getitem__(self, way: Way) -> kvdb.Client:
        return self._opened[self._place(way)]

    @contextmanager
    def sessions(self, chosen: list[Way]) -> Iterator[list[kvdb.Session]]:
        """A session over the context for each way, closed at the end. Those of one database are forks of one."""
        with ExitStack() as stack:
            first: dict[str, kvdb.Session] = {}
            opened = []
            for way in chosen:
                place = self._place(way)
                if place in first:
                    session = first[place].fork()
                else:
                    session = first[place] = self._opened[place].create_session(self.spec, self._ids)
                stack.callback(session.close)
                opened.append(session)
            yield opened

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def _open(self, kinds: tuple[str, ...] | list[str]) -> kvdb.Client:
        db = kvdb.connect(config=self._config)
        db.import_context(self.spec, self._ids, ((layer[0], layer[1]) for layer in self._kv), name=NAME)
        for kind in kinds:
            began = time.perf_counter()
            db.build_index(NAME, kind)
            say(f"built {kind} in {time.perf_counter() - began:.1f} s")
        return db

    @staticmethod
    def _place(way: Way) -> str:
        return way.name if way.learns else ""


def say(text: str) -> None:
    """A line of progress, to stderr."""
    print(text, file=sys.stderr, flush=True)
