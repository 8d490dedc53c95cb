"""Which tokens of the chunks are computed anew.

Whoever recomputes asks its strategy like this, layer after layer:

    strategy = strategies.make(options, spans, total, layers)
    computed = strategy.start()                                 # these tokens enter layer 0
    for layer in range(layers):
        if strategy.checks(layer):
            computed[positions] = strategy.goes_on(layer, positions, scores)    # scores: deviation of fresh from stored KV

A strategy that can say at once is one function in FIXED. One that looks at fresh KV is a class with these three methods.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdb.blend.deviation import DEFAULT_SCORE, score_name, spread
from kvdb.blend.select import Flags, counts, gradual, keep
from kvdb.errors import InvalidArgument
from kvdb.types import Float32

Positions: TypeAlias = npt.NDArray[np.int64]
Spans: TypeAlias = Sequence[tuple[int, int]]

DEFAULT_RATIO = 0.15
"""Of CacheBlend (arXiv 2405.16444, section 5): with so many tokens recomputed, quality was hardly below a full prefill's."""
DEFAULT_STEEPNESS = 0.3
"""A guess: the paper asks for slightly more than the ratio in the first layers and slightly less in the last."""


@dataclass(frozen=True)
class Recompute:
    """How much of the chunks is computed anew, and which tokens.

    ratio: the share of their tokens, the mean over layers, 0 to 1; None lets the controller choose, never under `floor`.
    strategy: a name of STRATEGIES. For the strategy "deviation", score: a name of SCORES; spread: a token counts as much as any
    token up to so many positions before it; steepness: how much more tokens the first layers take than the last ones, 0 for alike
    to 1; check_layer: the first layer whose fresh KV is looked at, all tokens go through those before. seed: of the strategy
    "random". Raises InvalidArgument.
    """

    ratio: float | None = None
    strategy: str = "deviation"
    floor: float = DEFAULT_RATIO
    score: str = DEFAULT_SCORE
    spread: int = 0
    steepness: float = DEFAULT_STEEPNESS
    check_layer: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for share in ("ratio", "floor", "steepness"):
            if share != "ratio" or self.ratio is not None:
                object.__setattr__(self, share, _share(share, getattr(self, share)))
        if str(self.strategy) not in STRATEGIES:
            raise InvalidArgument(f"Recompute.strategy is {self.strategy!r}; expected one of {', '.join(STRATEGIES)}")
        score_name(self.score)
        for whole, least in (("spread", 0), ("check_layer", 1), ("seed", 0)):
            value = getattr(self, whole)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"Recompute.{whole} is {value!r}; expected an integer of at least {least}")

    @classmethod
    def of(cls, given: "float | Recompute | None") -> "Recompute":
        """A ratio stands for itself with the defaults beside it, None for all defaults. Raises InvalidArgument."""
        return given if isinstance(given, Recompute) else cls(ratio=given)

    @property
    def share(self) -> float:
        """The ratio, or the floor as long as none is chosen."""
        return self.floor if self.ratio is None else self.ratio


class Strategy(Protocol):
    """Says for each layer which tokens of the chunks are computed. One is made for one prompt."""

    def start(self) -> Flags:
        """bool `[total]`, a copy: the tokens that enter layer 0."""

    def checks(self, layer: int) -> bool:
        """Whether fewer tokens go on from this layer than entered it."""

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        """bool `[n]`: of the tokens that entered a layer that checks, those that go through it and on.

        positions: int64 `[n]`, strictly ascending. scores: float32 `[n]`, the deviation of their KV in this layer; tokens without
        stored KV have +inf and go on always, beside the share that is asked for.
        """


def make(options: Recompute, spans: Spans, total: int, layers: int) -> Strategy:
    """The strategy that the options name, for chunks at spans [begin, end) of a prompt of `total` tokens.

    Raises InvalidArgument for spans that overlap, do not ascend or are not in [0, total).
    """
    until = 0
    for begin, end in spans:
        if not until <= begin <= end <= total:
            raise InvalidArgument(f"a chunk is at [{begin}, {end}); expected ascending spans without overlap in [0, {total})")
        until = end
    return STRATEGIES[options.strategy](options, spans, total, layers)


def everything(spans: Spans, total: int, ratio: float, seed: int) -> Flags:
    """All tokens, whatever the ratio: a full prefill of the chunks."""
    return inside(spans, total)


def nothing(spans: Spans, total: int, ratio: float, seed: int) -> Flags:
    """No tokens, whatever the ratio: plain reuse."""
    return np.zeros(total, np.bool_)


def first_of_each(spans: Spans, total: int, ratio: float, seed: int) -> Flags:
    """The first k tokens of each chunk, as EPIC's LegoLink (arXiv 2410.15332), k from the ratio.

    Short chunks give to longer ones what they do not need, and a rest that is no token for each goes to the first. A chunk at
    position 0 takes what the others leave: nothing stands before it, so its KV is right already.
    """
    begins = np.array([begin for begin, _ in spans], np.int64)
    lengths = np.array([end - begin for begin, end in spans], np.int64)
    taken = np.zeros_like(lengths)
    left = _tokens_of(int(lengths.sum()), ratio)
    for served in (begins > 0, begins == 0):
        while left and (open_ := np.flatnonzero(served & (taken < lengths))).size:
            each = min(left // len(open_), int((lengths - taken)[open_].min()))
            takers = open_ if each else open_[:left]
            taken[takers] += max(each, 1)
            left -= max(each, 1) * len(takers)
    flags = np.zeros(total, np.bool_)
    for begin, count in zip(begins, taken, strict=True):
        flags[begin : begin + count] = True
    return flags


def at_random(spans: Spans, total: int, ratio: float, seed: int) -> Flags:
    """Tokens drawn by chance, each as likely as any other: a control for the others."""
    flags = np.zeros(total, np.bool_)
    positions = np.flatnonzero(inside(spans, total))
    count = _tokens_of(len(positions), ratio)
    flags[np.random.default_rng(seed).permutation(positions)[:count]] = True
    return flags


def inside(spans: Spans, total: int) -> Flags:
    """bool `[total]`: the positions that lie in a chunk."""
    flags = np.zeros(total, np.bool_)
    for begin, end in spans:
        flags[begin:end] = True
    return flags


class Fixed:
    """A strategy that knows all from the start."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags

    def start(self) -> Flags:
        return self._flags.copy()

    def checks(self, layer: int) -> bool:
        return False

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        return np.ones(len(positions), np.bool_)


class ByDeviation:
    """The tokens whose fresh KV is farthest from their stored one (CacheBlend, arXiv 2405.16444, section 4).

    All enter; from the check layer on those go on that deviate most, fewer in each layer. A model that ends before its check
    layer is checked at its last. Where nothing is asked for, or there is but layer 0, whose KV depends on the token alone, none
    enter. counts: int64 `[layers]`, tokens of chunks that go on from each layer; 0 before the check layer, where all do.
    """

    def __init__(self, options: Recompute, spans: Spans, total: int, layers: int) -> None:
        self._spread = options.spread
        self._chunks = inside(spans, total)
        self._first = min(options.check_layer, layers - 1)
        tokens = int(self._chunks.sum())
        shares = gradual(layers, options.share, max(self._first, 1), options.steepness)
        self.counts = counts(shares, tokens)

    def start(self) -> Flags:
        return self._chunks.copy() if self.counts.any() else np.zeros_like(self._chunks)

    def checks(self, layer: int) -> bool:
        if not self.counts.any() or layer < self._first:
            return False
        entered = int(self._chunks.sum()) if layer == self._first else int(self.counts[layer - 1])
        return int(self.counts[layer]) < entered

    def goes_on(self, layer: int, positions: Positions, scores: Float32) -> Flags:
        unknown = int(np.count_nonzero(~np.isfinite(scores)))
        return keep(spread(scores, positions, self._spread), int(self.counts[layer]) + unknown)


Make: TypeAlias = Callable[[Recompute, Spans, int, int], Strategy]


def _fixed(choose: Callable[[Spans, int, float, int], Flags]) -> Make:
    def make_fixed(options: Recompute, spans: Spans, total: int, layers: int) -> Strategy:
        return Fixed(choose(spans, total, options.share, options.seed))

    return make_fixed


FIXED: Mapping[str, Callable[[Spans, int, float, int], Flags]] = {
    "all": everything,
    "none": nothing,
    "first": first_of_each,
    "random": at_random,
}
STRATEGIES: Mapping[str, Make] = {"deviation": ByDeviation, **{name: _fixed(choose) for name, choose in FIXED.items()}}


def _tokens_of(tokens: int, ratio: float) -> int:
    return int(np.rint(ratio * tokens))


def _share(what: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) <= 1:
        raise InvalidArgument(f"Recompute.{what} is {given!r}; expected a number from 0 to 1")
    return float(given)
