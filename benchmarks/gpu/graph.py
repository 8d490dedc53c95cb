"""What does a decode step take the host, launched anew and replayed as a CUDA graph?

A step appends a token to each of some sessions with a short context, and attends. As the host sees it, until the card is done.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from benchmarks.gpu import reference
from benchmarks.gpu.cache import Cache, asking, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding, exact
from benchmarks.gpu.results import Results, Wrong
from kvdb.attention.triton import blocks
from kvdb.gpu.graph import CapturedStep

TOKENS = 4000
STEPS = 4
"""The first is launched, the second captured, the others are replayed; the last block has room for as many."""


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    tokens = sizes.tokens if card.small else TOKENS
    for sessions in (1, sizes.sessions):
        case = f"{sessions} x {tokens:,} tokens"
        growing = Growing(card, seed + sessions, sessions, tokens)
        stream = None if card.interpreted else torch.cuda.Stream(card.device)
        step = CapturedStep(growing.launch, stream)
        errors = []
        for number in range(STEPS):
            new = growing.inputs(seed + 10 * number + 100)
            growing.decoding.poison()
            card.wait()  # what a step takes was made on another stream
            replay(step, stream, growing, new)
            card.wait()
            errors.append(growing.check(f"graph, {case}, step {number}", new))
        if not card.interpreted and not step.captured:
            raise Wrong(f"graph, {case}: the step was not captured")
        new = growing.inputs(seed)
        launched, replayed = card.wall(growing.launch), card.wall(partial(replay, step, stream, growing, new))
        results.add(case, "launched", ms=launched, error=errors[0])
        faster = {"ratio": launched / replayed} if launched and replayed else {}
        note = "launched each time, without a card" if card.interpreted else ""
        results.add(case, "replayed", ms=replayed, **faster, error=max(errors), note=note)


def replay(step: CapturedStep, stream: torch.cuda.Stream | None, growing: Growing, new: tuple[torch.Tensor, ...]) -> None:
    """A step with new inputs, which are copied to its buffers on its stream."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for buffer, part in zip(growing.buffers, new, strict=True):
            buffer.copy_(part, non_blocking=True)
        step()


class Growing:
    """Sessions that get a token each at every step. buffers: what a step reads: q `[sessions, q_heads, head_dim]`, k and v
    `[sessions, kv_heads, 1, head_dim]`, and how many tokens each session had, int32 `[sessions]`."""

    def __init__(self, card: Card, seed: int, sessions: int, tokens: int) -> None:
        self._card = card
        self.cache = Cache(card, *random(card, seed, sessions, tokens), seed)
        self.buffers = self.inputs(seed)
        self.decoding = Decoding(card, self.cache, self.buffers[0])

    def inputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        """The inputs of a step, in memory of their own."""
        cache = self.cache
        q = asking(self._card, seed, [cache.loaded(i)[0] for i in range(cache.sequences)])
        had = torch.tensor(cache.tokens, dtype=torch.int32, device=self._card.device)
        return q, *random(self._card, seed + 1, cache.sequences, 1), had

    def launch(self) -> None:
        _, k, v, had = self.buffers
        for i, table in enumerate(self.cache.tables):
            blocks.store(self.cache.pages, table, had[i : i + 1], k[i], v[i])
        torch.add(had, 1, out=self.decoding.batch.tails)
        self.decoding()

    def check(self, what: str, new: tuple[torch.Tensor, ...]) -> float:
        """After a step with these inputs. Raises Wrong."""
        for i in range(self.cache.sequences):
            self.cache.tokens[i] += 1
            stored = [x[:, -1:] for x in self.cache.loaded(i)]
            if not all(torch.equal(x, new[1 + n][i].float()) for n, x in enumerate(stored)):
                raise Wrong(f"{what}: the token that was appended to session {i} is not there")
        return reference.check(what, self.decoding.out, self.decoding.lse, exact(self.cache, new[0]))
