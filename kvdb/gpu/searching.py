"""One launch of searches by index pages, of parts of several sessions that are searched in the same way."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.attention.triton.coarse import coarse_top
from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.pages import TORCH, Pages, Runs
from kvdb.attention.triton.rope import rotate
from kvdb.attention.triton.workspace import Selection
from kvdb.blend.rope_shift import RopeShifts
from kvdb.gpu.outputs import LaunchOutputs, SearchGroup
from kvdb.gpu.scratch import Scratch
from kvdb.storage.slot import BOUND_TOKENS
from kvdb.types import ModelSpec


class SearchMethod(Protocol):
    """One way to search a piece of each of some sequences. unit: tokens of what the counts of its Selection count."""

    unit: int

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, outputs: LaunchOutputs) -> Selection:
        """Launch attention over what is found. floor: the largest q.k seen elsewhere, which only DIPR uses."""
        ...


class DiprSearch:
    """DIPR by four-bit codes of the keys; it selects tokens."""

    unit = 1

    def __init__(self, pages: Pages, runs: Runs, spec: ModelSpec, retrieval: Dipr, scratch: Scratch) -> None:
        self._arguments = pages, runs, spec.softmax_scale, retrieval.beta(spec.softmax_scale)
        self._workspace = scratch.dipr((pages.layout, runs.sequences, spec.q_heads, runs.tokens_max))

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, outputs: LaunchOutputs) -> Selection:
        return dipr(q, *self._arguments, floor, self._workspace, outputs.out, outputs.lse)


class TopPagesSearch:
    """Top-k by channel bounds; it selects pages with k tokens or more."""

    def __init__(self, pages: Pages, runs: Runs, spec: ModelSpec, retrieval: TopK, scratch: Scratch) -> None:
        self.unit = min(BOUND_TOKENS, pages.layout.block_size)
        k_pages = -(-min(retrieval.k, runs.tokens_max) // self.unit)
        self._arguments = pages, runs, spec.softmax_scale, k_pages
        self._workspace = scratch.coarse((pages.layout, runs.sequences, spec.q_heads, runs.tokens_max), k_pages)

    def __call__(self, q: torch.Tensor, floor: torch.Tensor, outputs: LaunchOutputs) -> Selection:  # noqa: ARG002
        return coarse_top(q, *self._arguments, self._workspace, outputs.out, outputs.lse)


class SearchLaunch:
    """The tensors of one launch of searches, of one group of parts that are searched in the same way."""

    def __init__(
        self,
        scratch: Scratch,
        pages: Pages,
        spec: ModelSpec,
        retrieval: Retrieval,
        group: SearchGroup,
        rope_shifts: Sequence[RopeShifts | None],
    ) -> None:
        """retrieval: a Dipr or a TopK. rope_shifts: of each session. Must be called inside `launching`."""
        self._interleaved = spec.rope is not None and spec.rope.layout == "interleaved"
        device = pages.slab.device
        lengths = [part.span.tokens for _, part in group]
        begins = np.cumsum([0, *(len(part.slots) for _, part in group)])
        table, begin, tokens = (
            torch.from_numpy(np.asarray(array, np.int32)).to(device)
            for array in (np.concatenate([part.slots for _, part in group]), begins[:-1], lengths)
        )
        self._runs = Runs(table, begin, tokens, max(lengths))
        if isinstance(retrieval, Dipr):
            self._search: SearchMethod = DiprSearch(pages, self._runs, spec, retrieval, scratch)
        else:
            assert isinstance(retrieval, TopK)
            self._search = TopPagesSearch(pages, self._runs, spec, retrieval, scratch)
        self._sessions = torch.tensor([session for session, _ in group], dtype=torch.int64, device=device)
        self._q = torch.empty((len(group), spec.q_heads, spec.head_dim), dtype=TORCH[spec.dtype], device=device)
        self._floor = torch.empty((len(group), spec.q_heads), device=device)
        self._rotations = [
            (row, torch.from_numpy(shifts.cos[part.rotation]).to(device), torch.from_numpy(shifts.sin[part.rotation]).to(device))
            for row, (session, part) in enumerate(group)
            if part.rotation >= 0 and (shifts := rope_shifts[session]) is not None
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`. The workspace is counted when it is made."""
        yield from (self._runs.table, self._runs.begin, self._runs.tokens, self._sessions, self._q, self._floor)
        for _, cos, sin in self._rotations:
            yield from (cos, sin)

    def launch(self, q: torch.Tensor, top: torch.Tensor, outputs: LaunchOutputs) -> None:
        """Launch the search of q `[sessions, q_heads, head_dim]`. top: float32 `[sessions, q_heads]`, the largest q.k seen
        elsewhere. Nothing here depends on the host."""
        torch.index_select(q, 0, self._sessions, out=self._q)
        torch.index_select(top, 0, self._sessions, out=self._floor)
        for row, cos, sin in self._rotations:
            heads = self._q[row][:, None]  # `rotate` takes rows of tokens: each head has one
            rotate(heads, cos, sin, self._interleaved, heads)
        selection = self._search(self._q, self._floor, outputs)
        outputs.missed.copy_(selection.missed)
        outputs.missed_bound.copy_(selection.missed_bound)
        tokens = self._runs.tokens[:, None]
        attended = torch.minimum(selection.counts * self._search.unit, tokens)
        outputs.counts.copy_(torch.where(selection.counts > selection.ids.shape[-1], tokens, attended))
