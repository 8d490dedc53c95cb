"""Chooses how much to recompute: what quality needs, and what loading hides (CacheBlend, arXiv 2405.16444, section 5).

What quality needs is measured on the prompt's own check layer: the tokens that deviate most, until what deviates of the others
is within a budget. While layer i is recomputed, layer i + 1 is loaded: up to the point where both take as long, more recompute
costs no time, and a slower tier costs none either.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvdb.blend.strategies import DEFAULT_RATIO
from kvdb.errors import InvalidArgument
from kvdb.types import Float32

TIE = 1 + 1e-9
"""Two times are equal if they differ by less than this factor: a ratio is computed from one of them."""


@dataclass(frozen=True)
class Rates:
    """The measured speed of this machine and model; None, or no entry, for what was not measured.

    recompute_seconds: one token through one layer. bytes_per_second: by tier, infinity for one that needs no loading.
    Numbers that are not positive count as not measured.
    """

    recompute_seconds: float | None = None
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)

    def load_seconds(self, tier: str, nbytes: float) -> float | None:
        """The seconds to load `nbytes` bytes from a tier, None where that was not measured."""
        rate = self.bytes_per_second.get(tier)
        return nbytes / rate if rate is not None and rate > 0 else None

    @property
    def token_seconds(self) -> float | None:
        """recompute_seconds, or None where it is not a positive finite number."""
        seconds = self.recompute_seconds
        return seconds if seconds is not None and 0 < seconds < math.inf else None


@dataclass(frozen=True)
class Chunks:
    """The chunks that a prompt reuses.

    tokens: the number of tokens by the tier where they lie now. token_nbytes: the bytes of one token's K and V in one layer.
    fresh: the number of tokens that are computed whatever the ratio is.
    """

    tokens: Mapping[str, int]
    token_nbytes: int
    layers: int
    fresh: int = 0

    @property
    def total(self) -> int:
        return sum(self.tokens.values())

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold any of the tokens, the one with the most first."""
        return tuple(sorted((tier for tier, count in self.tokens.items() if count), key=lambda tier: -self.tokens[tier]))


@dataclass(frozen=True)
class Choice:
    """The ratio that the controller chose, with its reason. `str(choice)` is a line of EXPLAIN.

    ratio: the share of the chunks' tokens to recompute. tier: where such chunks are best kept, which is the slowest tier that
    recompute hides; None where that is not known. load_seconds, recompute_seconds: the time of one layer. seconds: the time of
    all layers, pipelined. All three are None where not known. hidden: whether loading a layer takes no longer than recomputing
    one. floor: the least ratio. by_caller: whether the caller named the ratio. reason: why it was chosen.
    """

    ratio: float
    tier: str | None
    load_seconds: float | None
    recompute_seconds: float | None
    seconds: float | None
    hidden: bool
    floor: float
    by_caller: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The choice as plain values for machines, which `from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Choice":
        """The choice that `to_dict` wrote. Raises InvalidArgument for anything else."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidArgument(f"these are not a choice's values ({error}); expected what Choice.to_dict returns") from None

    def __str__(self) -> str:
        why = "asked for" if self.by_caller else f"floor {self.floor:.0%}"
        keep = f"; best kept in {self.tier}" if self.tier is not None else ""
        return f"recompute {self.ratio:.1%} ({why}): {self.reason}{keep}"


def choose(rates: Rates, chunks: Chunks, floor: float = DEFAULT_RATIO, ratio: float | None = None) -> Choice:
    """The ratio and the tier for a prompt.

    The ratio is the largest whose recompute takes no longer than loading, from `floor` up to 1; a `ratio` from the caller is kept
    as it is. The floor is taken where a rate is not known. The tier is the slowest that the recompute for quality hides, at the
    caller's ratio or the floor: a ratio that was raised only because a tier is slow must not justify that tier. Raises
    InvalidArgument for ratios outside [0, 1].
    """
    for what, share in (("floor", floor), ("ratio", ratio)):
        if share is not None and not 0 <= share <= 1:
            raise InvalidArgument(f"{what} is {share!r}; expected a ratio from 0 to 1")
    least = floor if ratio is None else ratio
    token, load = rates.token_seconds, _load_seconds(rates, chunks)
    if token is None or load is None:
        return Choice(least, None, load, None, None, False, floor, ratio is not None, _unknown(rates, chunks))
    chosen = least
    if ratio is None and chunks.total:
        chosen = min(max(least, (load / token - chunks.fresh) / chunks.total), 1.0)
    compute = token * (chunks.fresh + chosen * chunks.total)
    return Choice(
        ratio=chosen,
        tier=_cheapest(rates, chunks, token * (chunks.fresh + least * chunks.total)),
        load_seconds=load,
        recompute_seconds=compute,
        seconds=pipelined_seconds([load] * chunks.layers, [compute] * chunks.layers),
        hidden=load <= compute * TIE,
        floor=floor,
        by_caller=ratio is not None,
        reason=_reason(chunks, load, compute),
    )


def ratio_within(scores: Float32, error_max: float, layers: int) -> float:
    """The least share of tokens to recompute, those of the largest scores, so that what is left is within `error_max` over all
    layers.

    What is left in the measured layer is the sum of the other tokens' scores, divided by how many tokens there are. Every layer
    adds as much, and errors of layers add up in squares, so each may leave `error_max / sqrt(layers)`. scores: `[n]`, "weighted"
    of kvdb.blend.deviation; tokens with infinity, of which nothing is stored, do not count. layers: those that take stored KV, at
    least 1. A larger budget or fewer layers never give a larger share; 0 gives 1, also for tokens that do not deviate.
    """
    known = np.sort(scores[np.isfinite(scores)].astype(np.float64))
    if not len(known) or error_max <= 0:
        return float(len(known) > 0)
    left = np.cumsum(known) / len(known)  # by how many of the smallest are left
    return 1 - float(np.count_nonzero(left <= error_max / math.sqrt(layers))) / len(known)


def pipelined_seconds(loads: Sequence[float], computes: Sequence[float]) -> float:
    """The seconds of all layers, where each is loaded while the one before is computed: the first load, then the slower one of
    each pair.

    loads, computes: seconds of each layer.
    """
    if not loads:
        return 0.0
    return loads[0] + sum(map(max, loads[1:], computes[:-1])) + computes[-1]


def _load_seconds(rates: Rates, chunks: Chunks) -> float | None:
    """The seconds to load one layer, one tier after the other; None where that was not measured."""
    seconds = 0.0
    for tier in chunks.tiers:
        of_tier = rates.load_seconds(tier, chunks.tokens[tier] * chunks.token_nbytes)
        if of_tier is None:
            return None
        seconds += of_tier
    return seconds


def _cheapest(rates: Rates, chunks: Chunks, compute: float) -> str | None:
    """The slowest tier that loads a layer in that time, or the fastest if none does; None where there is nothing to keep."""
    loads: list[tuple[float, str]] = []
    for tier in rates.bytes_per_second:
        seconds = rates.load_seconds(tier, chunks.total * chunks.token_nbytes)
        if seconds is not None:
            loads.append((seconds, tier))
    if not loads or not chunks.total:
        return None
    hidden = [load for load in loads if load[0] <= compute * TIE]
    return max(hidden)[1] if hidden else min(loads)[1]


def _reason(chunks: Chunks, load: float, compute: float) -> str:
    if load == 0:
        return f"nothing has to be loaded for {_milliseconds(compute)} of recompute a layer"
    loading = f"loading {_milliseconds(load)} a layer from {' and '.join(chunks.tiers)}"
    if load <= compute * TIE:
        return f"{loading} is hidden by {_milliseconds(compute)} of recompute"
    return f"{loading} takes longer than {_milliseconds(compute)} of recompute"


def _unknown(rates: Rates, chunks: Chunks) -> str:
    unmeasured = [tier for tier in chunks.tiers if rates.load_seconds(tier, 1) is None]
    what = [f"loading from {tier}" for tier in unmeasured] + (["recompute"] if rates.token_seconds is None else [])
    return f"the speed of {' and of '.join(what)} is not measured yet"


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1000
    if milliseconds >= 100:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:.3g} ms" if milliseconds >= 0.001 else "under 0.001 ms"
