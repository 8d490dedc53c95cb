"""Partial recompute: the decoder's layers run on the tokens whose stored KV would be most wrong where they now stand.

CacheBlend (arXiv 2405.16444). The model's own forward does it, on the selected tokens at their true positions. Its attention goes
to the session, as in decoding, where the selected tokens read everything before them, stored and fresh. Hooks in front of the
layers drop the tokens that do not go on.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import kvdb
from engine_adapter.transformers.cache import Batch, Row, SessionLayer
from engine_adapter.transformers.support import decoder_layers
from kvdb.blend import strategies
from kvdb.blend.controller import ratio_within
from kvdb.blend.strategies import ByDeviation, Recompute
from kvdb.errors import IntegrityError, Unsupported
from kvdb.types import Float32, Positions
from query_optimizer.query_options import NO_OPTIONS

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


def recompute(
    model: PreTrainedModel, session: kvdb.Session, options: Recompute, token_seconds: float | None = None
) -> Recomputed:
    """Fill the gaps of a session that was laid out from parts, and recompute the tokens of its chunks that the options choose.

    The model is attached. token_seconds: what one token took in one layer when it was last measured. Raises Unsupported for a
    model whose layers cannot be run on some tokens only, IntegrityError for chunks that this model did not compute, and what
    `Session.overlay` raises; the session is then unfinished.
    """
    started = perf_counter()
    selection = _Selection(session, options, token_seconds)
    entering = np.flatnonzero(selection.entering)
    if len(entering):
        ids = torch.from_numpy(session.tokens[entering].astype(np.int64)).to(model.device)
        _Run(session, selection, entering).through(model, ids)
    fresh = int(selection.gaps.sum())
    recomputed = selection.overlaid / max(session.spec.layers - 1, 1)
    return Recomputed(
        reused=session.start - fresh - recomputed,
        recomputed=recomputed,
        fresh=fresh,
        choice=selection.choice,
        deviation=selection.deviation,
        token_layers=selection.token_layers,
        seconds=perf_counter() - started,
    )


class _Selection:
    """Which tokens are computed. chunks, gaps, entering: bool `[start]`, over positions. choice, deviation: as in `Recomputed`.
    overlaid: tokens of chunks that were computed anew, over all layers; token_layers: tokens that went through a layer, over all
    layers."""

    def __init__(self, session: kvdb.Session, options: Recompute, token_seconds: float | None) -> None:
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


class _Done(Exception):
    """Ends the model's forward pass: the last layer's keys and values are in the session, and its output is not needed."""


class _Probed(Exception):
    """Ends a layer once its keys and values, `[1, kv_heads, n, head_dim]`, are computed."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v


class _Layer(SessionLayer):
    """A layer of the cache whose tokens stand at any positions before the tail."""

    def __init__(self, number: int, batch: Batch, run: "_Run") -> None:
        super().__init__(number, batch, 0)
        self._run = run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._run.probing:
            raise _Probed(key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._run.attend(self.number, q[0], k[0], v[0]).unsqueeze(0)


class _Run:
    """One pass over the layers."""

    def __init__(self, session: kvdb.Session, selection: _Selection, entering: Positions) -> None:
        """entering: int64, the positions of the tokens that enter the first layer."""
        self.probing = False
        self._session = session
        self._selection = selection
        self._entered = len(entering)
        self._positions = entering  # of the tokens in the layer that is being run
        self._kept = np.arange(len(entering))  # which of those that entered they are
        self._next = 0

    def through(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        """Put the tokens `[n]` through the model's layers. Raises Unsupported for layers that cannot be run on some tokens."""
        batch = Batch(self._session.spec, [Row(self._session)], NO_OPTIONS)
        cache = Cache(layers=[_Layer(number, batch, self) for number in range(self._session.spec.layers)])
        positions = torch.from_numpy(self._positions).to(model.device)
        with ExitStack() as hooks:
            for number, module in enumerate(decoder_layers(model)):
                hooks.callback(module.register_forward_pre_hook(self._before(number), with_kwargs=True).remove)
            hooks.enter_context(torch.no_grad())
            hooks.enter_context(suppress(_Done))
            model.get_decoder()(input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        if self._next != self._session.spec.layers:
            raise Unsupported(f"layer {self._next} did not hand its keys to kvdb's attention, so its tokens cannot be recomputed")

    def attend(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Overlay a layer's new tokens and answer their queries, `[q_heads, n, head_dim]`."""
        session, positions, selection = self._session, self._positions, self._selection
        if number:
            session.overlay(number, positions, k, v)
            selection.overlaid += int(selection.chunks[positions].sum())
        else:
            self._first_layer(k, v)
        self._next = number + 1
        if self._next == session.spec.layers:
            raise _Done
        selection.token_layers += len(positions)
        out: torch.Tensor = session.attention(number, q, positions=positions)
        return out

    def _first_layer(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The first layer's KV depends on the token alone: only gaps need it, and stored KV that differs comes from another
        model."""
        gaps = np.flatnonzero(self._selection.gaps[self._positions])
        if len(gaps):
            self._session.overlay(0, self._positions[gaps], k[:, gaps], v[:, gaps])
        stored = np.flatnonzero(self._selection.chunks[self._positions])
        some = stored[:: max(1, -(-len(stored) // PROBED_TOKENS))]
        if not len(some):
            return
        deviations = self._session.deviation(0, self._positions[some], k[:, some], v[:, some], score="relative")
        worst = int(deviations.argmax())
        if float(deviations[worst]) > FIRST_LAYER_DEVIATION_MAX:
            raise IntegrityError(
                f"what is stored of the token at position {self._positions[some[worst]]} is not what the model computes in its "
                f"first layer: they differ by {float(deviations[worst]):.2f} of their size; the chunk is not of this text, model "
                "or RoPE, so import it again"
            )

    def _before(self, number: int) -> Any:
        """A hook in front of a layer, which lets only those tokens through that go on from here."""

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            hidden, *rest = args
            if len(self._kept) < self._entered:
                rest, kwargs = _selected(self._kept, self._entered, (rest, kwargs))
            if not self._selection.strategy.checks(number):
                return (hidden, *rest), kwargs
            probed = self._probe(number, module, (hidden, *rest), kwargs)
            scores = self._session.deviation(number, self._positions, probed.k[0], probed.v[0]).cpu().numpy()
            self._selection.measured(scores)
            going = np.flatnonzero(self._selection.strategy.goes_on(number, self._positions, scores))
            if not len(going):  # no later layer computes any token
                self._next = self._session.spec.layers
                raise _Done
            before = len(self._positions)
            self._positions, self._kept = self._positions[going], self._kept[going]
            hidden, rest, kwargs = _selected(going, before, (hidden, rest, kwargs))
            return (hidden, *rest), kwargs

        return hook

    def _probe(self, number: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Probed:
        """The keys and values of a layer for all its tokens."""
        self.probing = True
        try:
            module.forward(*args, **kwargs)
        except _Probed as probed:
            return probed
        finally:
            self.probing = False
        raise Unsupported(f"layer {number} did not hand its keys to its cache, so its tokens cannot be recomputed")


def _selected(tokens: npt.NDArray[np.int64], total: int, given: Any) -> Any:
    """A copy of `given` where each tensor over `total` tokens, in its first dimension or behind a batch of 1, has only some
    tokens."""
    if isinstance(given, torch.Tensor):
        index = torch.from_numpy(tokens).to(given.device)
        if given.ndim >= 2 and given.shape[:2] == (1, total):
            return given.index_select(1, index)
        return given.index_select(0, index) if given.ndim and given.shape[0] == total else given
    if isinstance(given, dict):
        return {name: _selected(tokens, total, value) for name, value in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(_selected(tokens, total, value) for value in given)
    return given
