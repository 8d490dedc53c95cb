"""Strategies, which choose the tokens of chunks that are computed anew.

The adapter asks a strategy like this, layer after layer:

    strategy = strategies.make(options, spans, total, layers)
    computed = strategy.start()                                 # these tokens enter layer 0
    for layer in range(layers):
        if strategy.checks(layer):
            computed[positions] = strategy.goes_on(layer, positions, scores)    # scores: deviation of fresh from stored KV

A strategy of one's own is a class with these three methods, and goes into `Recompute.strategy`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdb.blend.schedule import Flags, counts, gradual, keep
from kvdb.errors import InvalidArgument
from kvdb.types import Float32

Positions: TypeAlias = npt.NDArray[np.int64]
Spans: TypeAlias = Sequence[tuple[int, int]]

DEFAULT_RATIO = 0.15
"""For engines that do not measure: with this share of the tokens recomputed, CacheBlend (arXiv 2405.16444, section 5) found
quality hardly below that of a full prefill."""
DEFAULT_ERROR_MAX = 0.03
"""On SmolLM2-135M-Instruct 0.012 nats a token from a full prefill (benchmarks/README.md, "Blending: a pretrained model")."""
DEFAULT_STEEPNESS = 0.3
"""A guess: the paper asks for slightly more than the ratio in the first layers and slightly less in the last."""


class Strategy(Protocol):
    """Says for each layer which tokens of the chunks are computed. A strategy is made for one prompt."""

    def start(self) -> Flags:
        """The tokens that enter layer 0: bool `[total]`, a copy."""

    def checks(self, layer: int) -> bool:
        """Whether fewer tokens go on from this layer than entered it."""

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        """Which of the tokens that entered a layer that checks go through it and on: bool `[n]`.

        positions: int64 `[n]`, strictly ascending. scores: float32 `[n]`, the deviation of their KV in this layer; tokens without
        stored KV have +inf and always go on, in addition to the share that the options name.
        """


@dataclass(frozen=True)
class Recompute:
    """How much of the chunks is computed anew, and which tokens.

    ratio: the share of their tokens, a mean over the layers, 0 to 1; None lets the controller choose: the least with which the
    deviation that is left is within `error_max`, at least `floor`, and more where loading hides it. error_max: the deviation
    ("weighted", a mean over all tokens) that may be left in all layers together, 0 to 1, of which the check layer gets its part,
    see `kvdb.blend.controller.ratio_within`; 0 recomputes everything. A strategy of one's own
    chooses before anything is measured, so beside it `ratio` and `floor` count alone. steepness: how many more tokens the first
    layers take than the last ones, from 0 for equally many to 1. check_layer: the first layer whose fresh KV is compared; all
    tokens go through the layers before it. strategy: makes the strategy, called as (options, spans, total, layers) like `make`;
    None for the tokens that deviate most. Raises InvalidArgument.
    """

    ratio: float | None = None
    error_max: float = DEFAULT_ERROR_MAX
    floor: float = 0.0
    steepness: float = DEFAULT_STEEPNESS
    check_layer: int = 1
    strategy: "Callable[[Recompute, Spans, int, int], Strategy] | None" = None

    def __post_init__(self) -> None:
        for share in ("ratio", "error_max", "floor", "steepness"):
            if share != "ratio" or self.ratio is not None:
                object.__setattr__(self, share, _share(share, getattr(self, share)))
        layer: Any = self.check_layer
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer < 1:
            raise InvalidArgument(f"Recompute.check_layer is {layer!r}; expected an integer of at least 1")
        if self.strategy is not None and not callable(self.strategy):
            raise InvalidArgument(
                f"Recompute.strategy is {self.strategy!r}; expected None for the tokens that deviate most, or a function of "
                "(options, spans, total, layers) that returns a kvdb.blend.strategies.Strategy"
            )

    @classmethod
    def of(cls, given: "float | Recompute | None") -> "Recompute":
        """Takes a Recompute, a ratio, which leaves the other defaults, or None for all defaults. Raises InvalidArgument."""
        return given if isinstance(given, Recompute) else cls(ratio=given)

    @property
    def share(self) -> float:
        """The ratio, or the floor until one is chosen."""
        return self.floor if self.ratio is None else self.ratio


def make(options: Recompute, spans: Spans, total: int, layers: int) -> Strategy:
    """The strategy that the options name, for chunks at spans [begin, end) of a prompt of `total` tokens.

    Raises InvalidArgument for spans that overlap, do not ascend or are not in [0, total).
    """
    until = 0
    for begin, end in spans:
        if not until <= begin <= end <= total:
            raise InvalidArgument(f"a chunk is at [{begin}, {end}); expected ascending spans without overlap in [0, {total})")
        until = end
    return (options.strategy or ByDeviation)(options, spans, total, layers)


def inside(spans: Spans, total: int) -> Flags:
    """A mask of the positions that lie in a chunk: bool `[total]`."""
    flags = np.zeros(total, np.bool_)
    for begin, end in spans:
        flags[begin:end] = True
    return flags


class ByDeviation:
    """The tokens whose fresh KV is farthest from their stored one (CacheBlend, arXiv 2405.16444, section 4).

    All tokens enter; from the check layer on, those that deviate most go on, fewer in each layer. A model that ends before its
    check layer is checked at its last layer. No token enters if the ratio is 0, or if the only layer is layer 0, whose KV depends
    on the token alone. counts: int64 `[layers]`, the number of tokens of chunks that go on from each layer; 0 for layers before
    the check layer, from which all go on. blended: the number of layers that take stored KV, from the check layer on. settled:
    whether the ratio is known; where the options have none, `settle` is called between the check layer's scores and `goes_on`.
    """

    def __init__(self, options: Recompute, spans: Spans, total: int, layers: int) -> None:
        self._chunks = inside(spans, total)
        self._first = min(options.check_layer, layers - 1)
        self._layers = layers
        self.blended = layers - self._first
        self._steepness = options.steepness
        self.settled = options.ratio is not None or layers < 2 or not self._chunks.any()
        self._share_out(1.0 if options.ratio is None else options.ratio)

    def settle(self, ratio: float) -> None:
        """Go on with this share of the tokens, the mean over layers."""
        self.settled = True
        self._share_out(ratio)

    def _share_out(self, ratio: float) -> None:
        shares = gradual(self._layers, ratio, max(self._first, 1), self._steepness)
        self.counts = counts(shares, int(self._chunks.sum()))

    def start(self) -> Flags:
        return self._chunks.copy() if self.counts.any() else np.zeros_like(self._chunks)

    def checks(self, layer: int) -> bool:
        if not self.settled and layer == self._first:
            return True
        if not self.counts.any() or layer < self._first:
            return False
        entered = int(self._chunks.sum()) if layer == self._first else int(self.counts[layer - 1])
        return int(self.counts[layer]) < entered

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        del positions
        unknown = int(np.count_nonzero(~np.isfinite(scores)))
        return keep(scores, int(self.counts[layer]) + unknown)


def _share(what: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) <= 1:
        raise InvalidArgument(f"Recompute.{what} is {given!r}; expected a number from 0 to 1")
    return float(given)
