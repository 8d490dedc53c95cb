"""One launch of searches by index pages, of one part of each of some sessions."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.moves import Moves
from kvdb.attention.triton.coarse import coarse_top
from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.pages import TORCH, Pages, Runs
from kvdb.attention.triton.rope import rotate
from kvdb.attention.triton.workspace import Found as FoundThere
from kvdb.gpu.results import Found, Rows
from kvdb.gpu.scratch import Scratch
from kvdb.storage.slot import BOUND_TOKENS
from kvdb.types import ModelSpec


class Search(Protocol):
    """One way to search. unit: tokens of what it counts."""

    unit: int

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, rows: Rows) -> FoundThere:
        """floor: the largest q.k seen elsewhere, which only a range goes by."""
        ...


class ByCodes:
    """DIPR by codes of the keys."""

    unit = 1

    def __init__(self, pages: Pages, runs: Runs, spec: ModelSpec, retrieval: Dipr, scratch: Scratch) -> None:
        self._asked = pages, runs, spec.softmax_scale, retrieval.beta(spec.softmax_scale)
        self._workspace = scratch.codes((pages.layout, runs.sequences, spec.q_heads, runs.tokens_max))

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, rows: Rows) -> FoundThere:
        return dipr(q, *self._asked, floor, self._workspace, rows.out, rows.lse)


class ByBounds:
    """The k largest, of pages by the bounds of their channels."""

    def __init__(self, pages: Pages, runs: Runs, spec: ModelSpec, retrieval: TopK, scratch: Scratch) -> None:
        self.unit = min(BOUND_TOKENS, pages.layout.block_size)
        k_pages = -(-min(retrieval.k, runs.tokens_max) // self.unit)
        self._asked = pages, runs, spec.softmax_scale, k_pages
        self._workspace = scratch.bounds((pages.layout, runs.sequences, spec.q_heads, runs.tokens_max), k_pages)

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, rows: Rows) -> FoundThere:  # noqa: ARG002
        return coarse_top(q, *self._asked, self._workspace, rows.out, rows.lse)


class Searching:
    """What it needs on the device. retrieval: a Dipr, by codes, or a TopK, by channel bounds. moves: of each session."""

    def __init__(
        self,
        scratch: Scratch,
        pages: Pages,
        spec: ModelSpec,
        retrieval: Retrieval,
        found: Found,
        moves: Sequence[Moves | None],
    ) -> None:
        """Inside `at_work`."""
        self._interleaved = spec.rope is not None and spec.rope.layout == "interleaved"
        where = pages.slab.device
        lengths = [part.span.tokens for _, part in found]
        begins = np.cumsum([0, *(len(part.slots) for _, part in found)])
        table, begin, tokens = (
            torch.from_numpy(np.asarray(array, np.int32)).to(where)
            for array in (np.concatenate([part.slots for _, part in found]), begins[:-1], lengths)
        )
        self._runs = Runs(table, begin, tokens, max(lengths))
        if isinstance(retrieval, Dipr):
            self._search: Search = ByCodes(pages, self._runs, spec, retrieval, scratch)
        else:
            assert isinstance(retrieval, TopK)
            self._search = ByBounds(pages, self._runs, spec, retrieval, scratch)
        self._sessions = torch.tensor([session for session, _ in found], dtype=torch.int64, device=where)
        self._q = torch.empty((len(found), spec.q_heads, spec.head_dim), dtype=TORCH[spec.dtype], device=where)
        self._floor = torch.empty((len(found), spec.q_heads), device=where)
        self._turns = [
            (row, torch.from_numpy(of.cos[part.turn]).to(where), torch.from_numpy(of.sin[part.turn]).to(where))
            for row, (session, part) in enumerate(found)
            if part.turn >= 0 and (of := moves[session]) is not None
        ]

    def launch(self, q: torch.Tensor, top: torch.Tensor, rows: Rows) -> None:
        """q: `[sessions, q_heads, head_dim]`. top: float32 `[sessions, q_heads]`, the largest q.k seen elsewhere. Nothing depends
        on the host."""
        torch.index_select(q, 0, self._sessions, out=self._q)
        torch.index_select(top, 0, self._sessions, out=self._floor)
        for row, cos, sin in self._turns:
            heads = self._q[row][:, None]  # each of one token
            rotate(heads, cos, sin, self._interleaved, heads)
        found = self._search(self._q, self._floor, rows)
        rows.missed.copy_(found.missed)
        rows.missed_bound.copy_(found.missed_bound)
        tokens = self._runs.tokens[:, None]
        attended = torch.minimum(found.counts * self._search.unit, tokens)
        rows.counts.copy_(torch.where(found.counts > found.ids.shape[-1], tokens, attended))
