"""The attention of running requests, answered by kvdb: a session for each long request, one call a layer for all of a step."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.attention_options import AttentionOptions
from engine_adapter.vllm.layout import PackedLayout
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.presence import Presence
from engine_adapter.vllm.requests import Decoding
from kvdb.errors import KvdbError

Behind = Callable[[Callable[[], kvdb.Session]], "Future[kvdb.Session]"]
"""Opens a session once what was computed before is stored, as `Saves.behind` does."""


class BatchMetadata(Protocol):
    """What vLLM tells its attention of a batch. Row i has the tokens [query_start_loc[i], query_start_loc[i + 1]) of the step,
    the last of which is the last of seq_lens[i] tokens, in the blocks block_table[i]; all are integers."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


@dataclass
class _Running:
    """A request with a session over it. lengths: how many tokens the session holds, of each layer."""

    opening: "Future[kvdb.Session]"
    lengths: list[int]
    session: kvdb.Session | None = None


@dataclass(frozen=True)
class _Row:
    decode: Decoding
    running: _Running
    session: kvdb.Session


class Answers:
    """The requests that kvdb answers. vLLM's blocks hold all of their KV too, so that its own kernel goes on where kvdb cannot:
    a session that lacks tokens takes them from the blocks, and one that fails is let go, for good.

    caches: of each layer, by its number.
    """

    def __init__(
        self,
        contexts: ModelContexts,
        layout: PackedLayout,
        caches: Mapping[int, Tensor],
        options: AttentionOptions,
        behind: Behind,
        presence: Presence,
    ) -> None:
        self._contexts = contexts
        self._layout = layout
        self._caches = caches
        self._options = options
        self._behind = behind
        self._presence = presence
        self._running: dict[str, _Running] = {}
        self._left: set[str] = set()
        self._rows: list[_Row] = []
        self._answered: list[_Row] = []
        self._batch: tuple[BatchMetadata, Any] | None = None

    def begin(self, decodes: Sequence[Decoding], ended: frozenset[str]) -> None:
        """Begin a step. The sessions of requests that ended are closed; those of requests that are new are opened behind what
        waits to be stored, and answer from a later step on."""
        for name in ended:
            self._close(name)
            self._left.discard(name)
        self._batch, self._answered = None, []
        found = [self._row(decode) for decode in decodes if decode.request not in self._left]
        self._rows = [row for row in found if row is not None]

    def once(self, batch: BatchMetadata, make: Callable[[Sequence[int]], Any]) -> Any:
        """What `make` gives for the rows of a batch that kvdb answers, made once for all layers of a step."""
        if self._batch is None or self._batch[0] is not batch:
            self._batch = batch, make(self._place(batch))
        return self._batch[1]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Answer one layer of the rows that `once` told of, in their order; None where kvdb cannot, and vLLM must.

        q and the result: `[rows, q_heads, head_dim]`; k (after RoPE), v: `[rows, kv_heads, head_dim]`.
        """
        rows = self._answered
        if not rows:
            return None
        try:
            for row in rows:
                self._catch_up(row, layer)
            out = self._attend(rows, layer, q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2))
        except KvdbError as error:
            for row in rows:
                self._leave(row.decode.request, error)
            self._answered = []
            return None
        for row in rows:
            row.running.lengths[layer] += 1
        return out.squeeze(2)

    def sessions(self) -> dict[str, kvdb.Session]:
        """The open sessions by the names of their requests, such as for EXPLAIN. They stay this object's."""
        return {name: running.session for name, running in self._running.items() if running.session is not None}

    def close(self) -> None:
        """Close every session. vLLM computes from now on."""
        self._rows, self._answered = [], []
        for name in tuple(self._running):
            self._close(name)

    def _row(self, decode: Decoding) -> _Row | None:
        """What answers a request in this step; None where its session is not open yet, or it is left to vLLM."""
        name = decode.request
        running = self._running.get(name)
        if running is None:
            given = {"label": name, "error_max": self._options.query.error_max, "expected_tokens": decode.expected}
            opening = self._behind(lambda: self._contexts.open(decode.tokens, decode.salt, **given))
            self._running[name] = _Running(opening, [])
            return None
        if running.session is None:
            if not running.opening.done():
                return None
            try:
                running.session = running.opening.result()
            except KvdbError as error:
                self._leave(name, error)
                return None
            running.lengths = [running.session.start] * running.session.spec.layers
        if min(running.lengths) < self._options.from_tokens:
            self._leave(name, f"{min(running.lengths)} of its tokens are stored")
            return None
        if max(running.lengths) > decode.computed:
            self._leave(name, f"{max(running.lengths)} tokens were handed over, where vLLM has {decode.computed}")
            return None
        return _Row(decode, running, running.session)

    def _place(self, batch: BatchMetadata) -> list[int]:
        """Find the rows of a batch by all of their blocks and by how many tokens they have; what is not found is vLLM's."""
        found = place(batch, [row.decode for row in self._rows], self._layout.block_size)
        if lacking := [row.decode.request for row, i in zip(self._rows, found, strict=True) if i is None]:
            LOG.warning("kvdb steps aside for a step: it does not find %s in vLLM's batch", ", ".join(lacking))
        pairs = sorted((i, n) for n, i in enumerate(found) if i is not None)
        self._answered = [self._rows[n] for _, n in pairs]
        return [i for i, _ in pairs]

    def _catch_up(self, row: _Row, layer: int) -> None:
        """Hand over what vLLM computed while the session was not there. Raises KvdbError."""
        have, lengths = row.running.lengths[layer], row.running.lengths
        if have < row.decode.computed:
            k, v = self._layout.read(self._caches[layer], row.decode.blocks, have, row.decode.computed)
            row.session.update(layer, k, v, start=have)
            lengths[layer] = row.decode.computed

    def _attend(self, rows: Sequence[_Row], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Raises KvdbError."""
        options, starts = self._options.query, [row.decode.computed for row in rows]
        if len(rows) == 1:
            out: Tensor = rows[0].session.attend(layer, q[0], k[0], v[0], start=starts[0], options=options)
            return out.unsqueeze(0)
        sessions = [row.session for row in rows]
        together: Tensor = self._contexts.db.attend(sessions, layer, q, k, v, starts=starts, options=options)
        return together

    def _leave(self, name: str, reason: object) -> None:
        self._close(name)
        self._left.add(name)
        if not self._presence.lost(reason, "answered"):
            LOG.warning("kvdb steps aside: vLLM answers %s: %s", name, reason)

    def _close(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is None:
            return
        if running.session is None:
            running.opening.add_done_callback(_close_opened)
        else:
            with suppress(KvdbError):
                running.session.close()


def place(batch: BatchMetadata, decodes: Sequence[Decoding], block_size: int) -> list[int | None]:
    """The row of each request in a batch, None where there is none of exactly its blocks and tokens. Requests share the blocks of
    a common prefix, but never the block of their last token."""
    table, lengths = batch.block_table, batch.seq_lens
    counts = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    alone = [i for i, count in enumerate(counts.tolist()) if count == 1 and i < len(lengths)]
    last = {int(table[i, (int(lengths[i]) - 1) // block_size]): i for i in alone}
    return [_checked(last, table, lengths, decode, block_size) for decode in decodes]


def _checked(last: Mapping[int, int], table: Tensor, lengths: Tensor, decode: Decoding, block_size: int) -> int | None:
    needed = decode.computed // block_size + 1
    if len(decode.blocks) < needed:
        return None
    i = last.get(decode.blocks[needed - 1])
    if i is None or int(lengths[i]) != decode.computed + 1:
        return None
    return i if torch.equal(table[i, :needed].long().cpu(), torch.tensor(decode.blocks[:needed])) else None


def _close_opened(opening: "Future[kvdb.Session]") -> None:
    """Close a session whose request ended while it was opened."""
    if not opening.cancelled() and opening.exception() is None:
        with suppress(KvdbError):
            opening.result().close()
