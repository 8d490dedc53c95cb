"""Reading everything where searches missed more than a step's limits allow, decided on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from indexes.retrieval import Exact
from kvdb.attention.signs import SIGNS
from kvdb.attention.triton.finish import Rereading, States, judge
from kvdb.attention.triton.pages import Pages
from kvdb.gpu.device import Device
from kvdb.gpu.launch import track_memory
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.step_launches import StepLaunches
from kvdb.types import Float32, ModelSpec


@dataclass(frozen=True, eq=False)
class Limits:
    """What the answer of one session may miss. guards: float32 `[kv_heads]`, the logarithm of the mass that a KV head may be
    estimated to miss, relative to the mass it reads, None for no limit. ranges: as in `RunPartition`. bound: the
    share of the mass that any query may be bounded to miss, infinite for no limit."""

    guards: Float32 | None = None
    bound: float = np.inf
    ranges: Float32 | None = None

    @property
    def any(self) -> bool:
        return self.bound < np.inf or (self.guards is not None and bool((self.guards < np.inf).any()))


class Reread:
    """Exact attention of sessions over everything that they have, which is launched in each step, and has nothing to read where
    no session needs it. anew: what `kvdb.attention.triton.finish` takes of it."""

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, requests: Sequence[AttentionRequest]
    ) -> None:
        """Must be called inside `launching`."""
        self._spec = spec
        self._launches = StepLaunches(device, scratch, pages, spec, [request.with_retrieval(Exact()) for request in requests])
        n, where = len(requests), device.torch
        searched = [sum(part.span.tokens for part in request.parts if part.kind is not None) for request in requests]
        self.anew = Rereading(
            whole=self._launches.outputs.states(),
            guards=torch.full((n, spec.kv_heads), torch.inf, device=where),
            ranges=_everything(n, spec).to(where),
            bounds=torch.full((n,), torch.inf, device=where),
            needed=torch.zeros(n, dtype=torch.int32, device=where),
            any_needed=torch.zeros(1, dtype=torch.int32, device=where),
            tokens=torch.tensor(searched, dtype=torch.int32, device=where),
        )
        self._lengths = torch.zeros(0, dtype=torch.int32, device=where)
        track_memory(device, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`. What it launches counts its own."""
        anew = self.anew
        yield from (anew.guards, anew.ranges, anew.bounds, anew.needed, anew.any_needed, anew.tokens)

    def limit(self, limits: Sequence[Limits]) -> None:
        """Set the limits of each session. Must be called inside `launching`."""
        none = np.full(self._spec.kv_heads, np.inf, np.float32)
        guards = np.stack([none if one.guards is None else one.guards for one in limits])
        bounds = np.array([one.bound for one in limits], np.float32)
        for target, values in ((self.anew.guards, guards), (self.anew.bounds, bounds)):
            target.copy_(torch.from_numpy(values))
        for target, one in zip(self.anew.ranges, limits, strict=True):
            target.copy_(_everything(1, self._spec)[0] if one.ranges is None else torch.from_numpy(one.ranges))

    def follow_tails(self) -> bool:
        """See `StepLaunches.follow_tails`."""
        made = self._launches.follow_tails()
        if made:
            self._lengths = self._launches.batch.lengths.clone()
        return made

    def launch(self, q: torch.Tensor, states: States, tails: torch.Tensor) -> None:
        """Judge what searches found, and read everything where it is needed. tails: int32 `[sessions]`. Nothing here depends on
        the host."""
        launches, lengths = self._launches, self._lengths
        judge(states, self.anew, q)
        lengths[: len(tails)].copy_(tails)
        torch.mul(lengths, self.anew.any_needed, out=launches.batch.lengths)
        launches.q.copy_(q)
        launches.launch()


def _everything(n: int, spec: ModelSpec) -> torch.Tensor:
    """Ranges that everything lies in, float32 `[n, 2, SIGNS, q_heads]` in main memory."""
    return torch.tensor([-torch.inf, torch.inf])[None, :, None, None].repeat(n, 1, SIGNS, spec.q_heads)
