"""A transformers `Cache` whose keys and values lie in kvdb sessions, one for each row of the batch.

A layer's `update` keeps nothing: it ties itself to the key tensor and hands it back, so that the attention function, which gets
nothing else of the cache, finds the sessions by the tensor (`layer_of`). There is no table of sessions to look anything up in.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import kvdb
from kvdb.errors import InvalidArgument, ShapeError, Unsupported
from query_optimizer.query_options import NO_OPTIONS

_LAYER = "_kvdb_layer"


class StoredLength(int):
    """A length of keys that lie in kvdb. The mask function sees nothing else of the cache; by this type it knows to make no
    mask."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch.

    padding: the number of columns of its prompt without a token. padding_end: the column behind the last of them. unstored: the
    column, if any, whose query is answered although its key is not stored: the last one of a prompt that ends in padding.
    """

    session: kvdb.Session
    padding: int = 0
    padding_end: int = 0
    unstored: int | None = None


class SessionBatch:
    """The state that the layers of one cache share.

    options: which tokens are read. db: answers all rows in one call; None to answer each row by itself, as for a single row.
    waiting: the layer whose new keys have not reached the attention function yet.
    """

    def __init__(self, spec: kvdb.ModelSpec, rows: list[Row], options: kvdb.QueryOptions, db: kvdb.Client | None = None) -> None:
        self.spec = spec
        self.db = db
        self.rows = rows
        self.options = options
        self.waiting: int | None = None

    def check_answered(self) -> None:
        """Raises Unsupported when a layer's keys never came to the attention function, so that kvdb did not see them."""
        if self.waiting is not None:
            raise Unsupported(
                f"layer {self.waiting} does not hand the keys it got from its cache to the attention function; "
                "kvdb works with attention layers that do nothing between the two"
            )


class SessionLayer(CacheLayerMixin):
    """One layer of the cache. length: the number of the batch's columns that it holds, padding included. window: how many columns
    a query sees, its own included, None for all before it."""

    window: int | None = None
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, number: int, batch: SessionBatch, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number
        self.batch = batch
        self.length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to prepare."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values on, `[batch, kv_heads, n, head_dim]`, the keys tied to this layer. Raises Unsupported."""
        self.batch.check_answered()
        self.batch.waiting = self.number
        setattr(key_states, _LAYER, self)
        return key_states, value_states

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Append the new tokens' k and v to the sessions and answer q.

        q: `[batch, q_heads, n, head_dim]`; k (after RoPE), v: `[batch, kv_heads, n, head_dim]`; the result: `[batch, n, q_heads,
        head_dim]`. scaling: what the layer multiplies q.k with, None for 1/sqrt(head_dim). Raises ShapeError, Unsupported, and
        what `Session.attend` raises.
        """
        self._check(q, k, v, scaling)
        self.batch.waiting = None
        out = self._attend(q, k, v)
        self.length += k.shape[2]
        return out.transpose(1, 2).contiguous()

    def select(self, indices: list[int]) -> None:
        """Note that row i is what row `indices[i]` was."""

    def set_length(self, length: int) -> None:
        """Note that the sessions hold `length` columns, which did not all come through this layer."""
        self.length = length

    def take_back(self, columns: int) -> None:
        """Note that the sessions hold that many columns less."""
        self.length -= columns

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return StoredLength(self.length + query_length), 0

    def reset(self) -> None:
        raise Unsupported("a cache over sessions is not emptied; take back its last columns with crop, or open another")

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, rows = self.batch, self.batch.rows
        starts = [None if row.unstored == self.length else self.length - row.padding for row in rows]
        known = [start for start in starts if start is not None]
        if len(known) == len(rows) > 1 and batch.db is not None:
            sessions = [row.session for row in rows]
            together: torch.Tensor = batch.db.attend(sessions, self.number, q, k, v, starts=known, options=batch.options)
            return together
        outs = [
            row.session.attention(self.number, q[i], options=batch.options)
            if start is None
            else row.session.attend(self.number, q[i], k[i], v[i], start=start, options=batch.options)
            for i, (row, start) in enumerate(zip(rows, starts, strict=True))
        ]
        return outs[0].unsqueeze(0) if len(outs) == 1 else torch.stack(outs)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> None:
        if q.shape[0] != len(self.batch.rows):
            raise ShapeError(f"layer {self.number} asks for {q.shape[0]} rows; expected {len(self.batch.rows)}, one a session")
        self._check_asked(k, v, scaling)

    def _check_asked(self, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> None:
        """Raises Unsupported for attention that kvdb does not compute."""
        spec = self.batch.spec
        if self.batch.waiting != self.number:
            raise Unsupported(
                f"layer {self.number} asks for attention more than once over the same keys; kvdb works with layers that ask once"
            )
        if v.shape[-1] != k.shape[-1]:
            raise Unsupported(
                f"layer {self.number} has keys of {k.shape[-1]} and values of {v.shape[-1]} dimensions; expected the same"
            )
        scale = k.shape[-1] ** -0.5 if scaling is None else scaling
        if not math.isclose(scale, spec.softmax_scale, rel_tol=1e-6):
            raise Unsupported(f"layer {self.number} scales its scores by {scale}; expected {spec.softmax_scale}, as in the spec")


MakeLayer = Callable[[int, SessionBatch, int], SessionLayer]
"""Called as (number, batch, length) for each layer of a cache."""


class SessionCache(Cache):
    """The cache of one batch, over the sessions of its rows. At the end of a `with` the sessions are closed.

    length: columns that the sessions hold already; row i holds `length - rows[i].padding` tokens of them. options: which tokens
    every query reads. db: where several rows are answered together, None to answer each by itself. make: makes the layers.
    """

    def __init__(
        self,
        spec: kvdb.ModelSpec,
        rows: list[Row],
        length: int,
        options: kvdb.QueryOptions = NO_OPTIONS,
        db: kvdb.Client | None = None,
        make: MakeLayer = SessionLayer,
    ) -> None:
        self._batch = SessionBatch(spec, list(rows), options, db)
        self._session_layers = [make(number, self._batch, length) for number in range(spec.layers)]
        super().__init__(layers=list(self._session_layers))

    @property
    def rows(self) -> list[Row]:
        """The rows, in the batch's present order."""
        return list(self._batch.rows)

    @property
    def sessions(self) -> list[kvdb.Session]:
        """The sessions of the rows, in the batch's present order."""
        return [row.session for row in self._batch.rows]

    def check_answered(self) -> None:
        """Raises Unsupported when the last layer that was updated did not ask kvdb for its attention."""
        self._batch.check_answered()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i continue row `beam_idx[i]`: a row that several continue is forked, and one that none continues is closed."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork each row, so that `repeats` adjacent rows continue it."""
        self._select([row for row in range(len(self._batch.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these rows, in this order. indices: anything that selects rows of a tensor, such as numbers or a mask."""
        picked = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
        self._select(np.arange(len(self._batch.rows))[picked].ravel().tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns of every row, such as rejected drafts. Raises InvalidArgument for a
        positive number, as transformers does, for more columns than there are, and for columns of padding."""
        length = self.get_seq_length() + tokens_to_remove
        first = max((row.padding_end for row in self._batch.rows), default=0)
        if not first <= length <= self.get_seq_length():
            raise InvalidArgument(
                f"crop({tokens_to_remove}) of a cache of {self.get_seq_length()} columns; expected 0, or a negative number of up "
                f"to {self.get_seq_length() - first} columns, those behind the last padding"
            )
        if tokens_to_remove:
            for row in self._batch.rows:
                row.session.truncate(length - row.padding)
            for layer in self._session_layers:
                layer.take_back(-tokens_to_remove)

    def close(self) -> None:
        """Close the sessions. Closing twice does nothing."""
        with ExitStack() as closing:
            for session in self.sessions:
                closing.callback(session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_length(self, length: int) -> None:
        """Note that the sessions hold `length` columns."""
        for layer in self._session_layers:
            layer.set_length(length)

    def _select(self, indices: list[int]) -> None:
        old = self._batch.rows
        if indices == list(range(len(old))):
            return
        taken: set[int] = set()
        new: list[Row] = []
        with ExitStack() as undo:
            for index in indices:
                row = old[index]
                if index in taken:
                    row = replace(row, session=row.session.fork())
                    undo.callback(row.session.close)
                taken.add(index)
                new.append(row)
            undo.pop_all()
        self._batch.rows = new
        for layer in self._session_layers:
            layer.select(indices)
        for index, row in enumerate(old):
            if index not in taken:
                row.session.close()


def layer_of(key: torch.Tensor) -> SessionLayer | None:
    """The layer that handed this key tensor out, or None for keys that kvdb has nothing to do with."""
    return getattr(key, _LAYER, None)
