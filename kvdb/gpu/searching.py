"""One launch of searches by index pages, of one part of each of some sessions."""

from collections.abc import Sequence

import numpy as np
import torch

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.moves import Moves
from kvdb.attention.triton.coarse import coarse_top
from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.pages import TORCH, Pages, Runs
from kvdb.attention.triton.rope import rotate
from kvdb.attention.triton.workspace import Workspace
from kvdb.gpu.device import Device
from kvdb.gpu.results import Found, Rows
from kvdb.storage.slot import BOUND_TOKENS
from kvdb.types import ModelSpec


class Searching:
    """What it needs on the device. retrieval: a Dipr, by codes, or a TopK, by channel bounds. moves: of each session."""

    def __init__(
        self,
        device: Device,
        pages: Pages,
        spec: ModelSpec,
        retrieval: Retrieval,
        found: Found,
        moves: Sequence[Moves | None],
    ) -> None:
        """Inside `at_work`."""
        self._pages = pages
        self._spec = spec
        self._retrieval = retrieval
        where = device.torch
        lengths = [part.span.tokens for _, part in found]
        begins = np.cumsum([0, *(len(part.slots) for _, part in found)])
        table, begin, tokens = (
            torch.from_numpy(np.asarray(array, np.int32)).to(where)
            for array in (np.concatenate([part.slots for _, part in found]), begins[:-1], lengths)
        )
        self._runs = Runs(table, begin, tokens, max(lengths))
        self._workspace = Workspace.of(pages.layout, len(found), spec.q_heads, max(lengths), where)
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
        spec, retrieval = self._spec, self._retrieval
        torch.index_select(q, 0, self._sessions, out=self._q)
        torch.index_select(top, 0, self._sessions, out=self._floor)
        for row, cos, sin in self._turns:
            rotate(self._q[row], cos, sin, spec.rope is not None and spec.rope.layout == "interleaved", self._q[row])
        wanted = self._pages, self._runs, spec.softmax_scale
        if isinstance(retrieval, Dipr):
            beta = retrieval.beta(spec.softmax_scale)
            found = dipr(self._q, *wanted, beta, self._floor, self._workspace, rows.out, rows.lse)
            unit = 1
        else:
            assert isinstance(retrieval, TopK)
            unit = min(BOUND_TOKENS, self._pages.layout.block_size)
            k = -(-retrieval.k // unit)
            found = coarse_top(self._q, *wanted, k, self._workspace, rows.out, rows.lse)
        rows.missed.copy_(found.missed)
        rows.missed_bound.copy_(found.missed_bound)
        tokens = self._runs.tokens[:, None]
        attended = torch.minimum(found.counts * unit, tokens)
        rows.counts.copy_(torch.where(found.counts > found.ids.shape[-1], tokens, attended))
