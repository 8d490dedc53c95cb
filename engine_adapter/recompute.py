"""Which tokens of a laid-out prompt an engine computes anew, layer by layer, and what it hands to the session for them.

CacheBlend (arXiv 2405.16444). An engine runs its own layers on the selected tokens at their true positions:

    selection = SelectedTokens(session, options)
    going = Pass(session, selection)
    for layer in range(layers):
        if going.checks(layer):
            kept = going.keep(layer, k, v)          # of the tokens that entered, these go on
        out = going.attend(layer, q, k, v)          # in place of the engine's own attention
"""

from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
from torch import Tensor

import kvdb
from kvdb.blend import strategies
from kvdb.blend.controller import ratio_within
from kvdb.blend.strategies import ByDeviation, Recompute
from kvdb.errors import IntegrityError
from kvdb.types import Float32

PROBED_TOKENS = 64
"""The number of tokens whose stored keys in the first layer are compared with those that the model computes."""
FIRST_LAYER_DEVIATION_MAX = 0.1
"""The largest relative deviation of such a token: rounding to 16 bits gives less than 0.02, another text about 2."""


@dataclass(frozen=True)
class Recomputed:
    """The result of a recompute. reused: tokens whose stored KV stayed. recomputed: tokens of chunks that were computed anew, the
    mean over the layers behind the first. fresh: tokens whose KV was not stored. choice: the ratio, and why. deviation: the mean
    of the chunks' tokens in the check layer, before any was recomputed; None where it was not measured. token_layers: the number
    of times that a token went through a layer. seconds: the time of the whole recompute."""

    reused: float
    recomputed: float
    fresh: int
    choice: kvdb.Choice
    deviation: float | None
    token_layers: int
    seconds: float

    @property
    def token_seconds(self) -> float | None:
        """The seconds of one token in one layer; None where nothing was computed."""
        return self.seconds / self.token_layers if self.token_layers else None


class SelectedTokens:
    """Which tokens are computed. chunks, gaps, entering: bool `[start]`, over positions. choice, deviation: as in `Recomputed`.
    overlaid: tokens of chunks that were computed anew, over all layers; token_layers: tokens that went through a layer, over all
    layers."""

    def __init__(self, session: kvdb.Session, options: Recompute, token_seconds: float | None = None) -> None:
        placed, total = session.layout, session.start
        spans = [(part.begin, part.end) for part in placed if part.kind == "chunk"]
        self.chunks = strategies.inside(spans, total)
        self.gaps = strategies.inside([(part.begin, part.end) for part in placed if part.kind == "tokens"], total)
        self._plan = partial(session.plan_recompute, seconds=token_seconds)
        self._options = options
        self.choice = self._plan(floor=options.floor, ratio=options.ratio)
        self.deviation: float | None = None
        known = options if options.strategy is None else replace(options, ratio=self.choice.ratio)
        self.strategy = strategies.make(known, spans, total, session.spec.layers)
        self.entering = self.strategy.start() | self.gaps
        self.overlaid = self.token_layers = 0

    def measured(self, scores: Float32) -> None:
        """The check layer's deviations `[n]`, infinite for gaps: the first ones settle the ratio where none was given."""
        if self.deviation is None:
            known = scores[np.isfinite(scores)]
            self.deviation = float(known.mean()) if len(known) else None
        if isinstance(self.strategy, ByDeviation) and not self.strategy.settled:
            needed = ratio_within(scores, self._options.error_max, self.strategy.blended)
            self.choice = self._plan(floor=max(self._options.floor, needed))
            self.strategy.settle(self.choice.ratio)

    def result(self, session: kvdb.Session, started: float) -> Recomputed:
        """What was done, once every layer has run. started: when, by `time.perf_counter`."""
        fresh = int(self.gaps.sum())
        recomputed = self.overlaid / max(session.spec.layers - 1, 1)
        return Recomputed(
            reused=session.start - fresh - recomputed,
            recomputed=recomputed,
            fresh=fresh,
            choice=self.choice,
            deviation=self.deviation,
            token_layers=self.token_layers,
            seconds=perf_counter() - started,
        )


class LayerEnded(Exception):
    """Ends a layer whose keys and values, `[kv_heads, n, head_dim]`, are wanted alone."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v


class Pass:
    """One pass of the selected tokens over the layers.

    positions: int64, of the tokens in the layer that is being run. next: the first layer that has not been answered.
    """

    def __init__(self, session: kvdb.Session, selection: SelectedTokens) -> None:
        self.positions = np.flatnonzero(selection.entering)
        self.next = 0
        self._session = session
        self._selection = selection

    @property
    def done(self) -> bool:
        """Whether no later layer computes any token."""
        return self.next == self._session.spec.layers

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The ids of the tokens, int64 `[n]`."""
        return self._session.tokens[self.positions].astype(np.int64)

    def checks(self, layer: int) -> bool:
        """Whether fewer tokens go on from this layer than entered it."""
        return self._selection.strategy.checks(layer)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> npt.NDArray[np.int64]:
        """Which of a layer's tokens go through it, int64 `[m]`, counted from the first; with none of them the pass is done.

        k (after RoPE), v: `[kv_heads, n, head_dim]`, of all tokens that entered.
        """
        scores = self._session.deviation(layer, self.positions, k, v).cpu().numpy()
        self._selection.measured(scores)
        going = np.flatnonzero(self._selection.strategy.goes_on(layer, self.positions, scores))
        if not len(going):
            self.next = self._session.spec.layers
        self.positions = self.positions[going]
        return going

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Overlay a layer's new tokens and answer their queries, `[q_heads, n, head_dim]`; None behind the last layer, whose
        output nobody reads. Raises IntegrityError for chunks that this model did not compute, and what `Session.overlay`
        raises."""
        session, positions, selection = self._session, self.positions, self._selection
        if layer:
            session.overlay(layer, positions, k, v)
            selection.overlaid += int(selection.chunks[positions].sum())
        else:
            self._first_layer(k, v)
        self.next = layer + 1
        if self.done:
            return None
        selection.token_layers += len(positions)
        out: Tensor = session.attention(layer, q, positions=positions)
        return out

    def _first_layer(self, k: Tensor, v: Tensor) -> None:
        """The first layer's KV depends on the token alone: only gaps need it, and stored KV that differs comes from another
        model."""
        gaps = np.flatnonzero(self._selection.gaps[self.positions])
        if len(gaps):
            self._session.overlay(0, self.positions[gaps], k[:, gaps], v[:, gaps])
        stored = np.flatnonzero(self._selection.chunks[self.positions])
        some = stored[:: max(1, -(-len(stored) // PROBED_TOKENS))]
        if not len(some):
            return
        deviations = self._session.deviation(0, self.positions[some], k[:, some], v[:, some], score="relative")
        worst = int(deviations.argmax())
        if float(deviations[worst]) > FIRST_LAYER_DEVIATION_MAX:
            raise IntegrityError(
                f"what is stored of the token at position {self.positions[some[worst]]} is not what the model computes in its "
                f"first layer: they differ by {float(deviations[worst]):.2f} of their size; the chunk is not of this text, model "
                "or RoPE, so import it again"
            )
