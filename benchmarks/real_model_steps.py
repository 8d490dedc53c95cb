"""Teacher-forced decode steps of several sessions at once, each answered its own way, and what they are off by.

All sessions are rows of one batch, so that the model's weights are read once for all of them and every row meets the same noise
of the machine. Each layer's attention is one `Session.attend` a row, with that row's own options, timed by itself; rows take
turns in being the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

import kvdb
from benchmarks.real_model_contexts import say
from benchmarks.real_model_texts import Question, Subject
from benchmarks.real_model_ways import EXACT, Way
from engine_adapter.transformers.cache import Row, SessionCache
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

SAY_STEPS = 16


class EachItsOwn:
    """Answers the rows of a batch, each its own way.

    seconds: of each row's attention, one value a step. errors: the relative error of its layers' outputs, Frobenius norm over all
    query heads, beside exact attention to the same query; one value a layer of every `error_steps`-th step, 0 for none.
    """

    def __init__(self, ways: Sequence[Way], error_steps: int = 0) -> None:
        self.ways = list(ways)
        self.seconds: list[list[float]] = [[] for _ in self.ways]
        self.errors: list[list[float]] = [[] for _ in self.ways]
        self._chance = torch.Generator().manual_seed(0)
        self._error_steps = error_steps
        self._turn = 0

    def next_step(self) -> None:
        """Another step begins."""
        for seconds in self.seconds:
            seconds.append(0.0)

    def attend(
        self,
        sessions: Sequence[kvdb.Session],
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        starts: Sequence[int],
        options: QueryOptions,  # noqa: ARG002  # the cache's, in place of which each way has its own
    ) -> torch.Tensor:
        """What `Client.attend` returns: float `[rows, q_heads, 1, head_dim]`."""
        self._turn += 1
        outs: dict[int, torch.Tensor] = {}
        for turn in range(len(sessions)):
            i = (turn + self._turn) % len(sessions)
            begin = perf_counter()
            out = sessions[i].attend(layer, q[i], k[i], v[i], start=starts[i], options=self.ways[i].options)
            self.seconds[i][-1] += perf_counter() - begin
            outs[i] = self._disturbed(out, self.ways[i].noise)
            if self._error_steps and len(self.seconds[i]) % self._error_steps == 0:
                with sessions[i].fork() as twin:  # so that the session's own counters stay as they are
                    exact = twin.attention(layer, q[i], options=EXACT.options)
                self.errors[i].append(float((outs[i] - exact).norm() / exact.norm()))
        return torch.stack([outs[i] for i in range(len(sessions))])

    def _disturbed(self, out: torch.Tensor, error: float) -> torch.Tensor:
        """An output with a relative error in a random direction."""
        if not error:
            return out
        noise = torch.randn(out.shape, generator=self._chance)
        return out + error * noise * (out.norm() / noise.norm())


def logits_of(
    subject: Subject, spec: kvdb.ModelSpec, sessions: Sequence[kvdb.Session], each: EachItsOwn, ids: Sequence[int]
) -> Iterator[torch.Tensor]:
    """The logits behind each of the ids, float32 `[rows, vocabulary]`, which all rows read one after the other.

    The model must be attached, and the sessions of one length, at least two of them.
    """
    rows = [Row(session) for session in sessions]
    cache = SessionCache(spec, rows, sessions[0].stats().tokens, NO_OPTIONS, cast(kvdb.Client, each))
    with torch.no_grad():
        for token in ids:
            each.next_step()
            out: Any = subject.model(torch.full((len(rows), 1), token), past_key_values=cache, use_cache=True)
            yield out.logits[:, -1]
    cache.check_answered()


@dataclass
class Measured:
    """What one row's answers were off by, a value a step: the divergence from exact attention in nats, whether the most probable
    token was the same, and the negative logarithm of the next token's probability."""

    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, reference: torch.Tensor, following: int) -> None:
        """One step. logits, reference: log-probabilities, float64 `[vocabulary]`."""
        self.kl.append(max(0.0, float((reference.exp() * (reference - logits)).sum())))
        self.same_top.append(bool(logits.argmax() == reference.argmax()))
        self.nll.append(-float(logits[following]))

    def summary(self) -> dict[str, object]:
        """Means and extremes over the steps."""
        return {
            "steps": len(self.kl),
            "kl": statistics.mean(self.kl),
            "kl_max": max(self.kl),
            "same_top": statistics.mean(self.same_top),
            "nll": statistics.mean(self.nll),
        }


def compare(logits: Iterator[torch.Tensor], ids: Sequence[int], ways: Sequence[Way]) -> list[Measured]:
    """Each row against the first, which is exact. ids: those that were read, and the one behind them."""
    measured = [Measured() for _ in ways]
    for step, batch in enumerate(logits):
        if step % SAY_STEPS == SAY_STEPS - 1:
            so_far = ", ".join(f"{way.name} {statistics.mean(mine.kl):.2g}" for way, mine in zip(ways, measured, strict=True))
            say(f"{step:,} of {len(ids) - 1:,} steps, KL so far: {so_far}")
        told = torch.log_softmax(batch.double(), -1)
        for row, mine in enumerate(measured):
            mine.add(told[row], told[0], ids[step + 1])
    return measured


def answered(logits: Iterator[torch.Tensor], question: Question) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows would tell the right answer, bool `[rows]`: each of its tokens is the most probable one behind those before."""
    tops = [batch.argmax(-1).numpy() for batch in logits][len(question.asked) - 1 :]
    return np.all([top == token for top, token in zip(tops, question.answer, strict=True)], axis=0)
