"""Heads made to be answered wrongly: what estimates, samples and largest weights do not show.

Each KV head has some directions of its own, its roles. A key carries an amount of each role beside noise, a query asks for
roles, and their product is the logit, so that every mass below is set on purpose. Values are noise about a mean, without which
the output of a flat head would be nothing but noise, and what the roles' tokens have of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import BFLOAT16, Float32

ROLES = 3
DIRECTIONS = 24
"""The roles of heads whose queries come to ask for all of them at once."""
FLAT_NOISE = 0.3
"""The standard deviation of logits that no role has part in."""
PAGE = 64
MOODS_SHARE = 0.03
"""The share of a head's queries, if it has moods, that look elsewhere: fewer than its 95th percentile shows."""


@dataclass(frozen=True)
class Size:
    """tokens: that are stored. queries: different ones before heads change their habits, and as many after it."""

    tokens: int
    kv_heads: int = 4
    group: int = 4
    head_dim: int = 128
    queries: int = 192


@dataclass(frozen=True)
class Adversary:
    """One layer. k, v: bfloat16 `[kv_heads, n, head_dim]`. before, after: bfloat16 `[q_heads, m, head_dim]`, queries before and
    after the heads change their habits; after is None for heads that never do."""

    name: str
    k: npt.NDArray[np.generic]
    v: npt.NDArray[np.generic]
    before: npt.NDArray[np.generic]
    after: npt.NDArray[np.generic] | None


class Head:
    """One KV head that is being made.

    amounts: float32 `[n, ROLES]`, of each key. values: float32 `[n, head_dim]`. strengths, changed: float32 `[m, ROLES]`, the
    logit that a query gives to an amount of 1, before and after a change of habits. noise, offset: float32 `[n, head_dim]` and
    `[head_dim]`, of the keys beside their roles. query_noise: the standard deviation of what queries have beside theirs, before
    and after the change. number: of the head in its layer. odd: whether that is odd, so that layers have
    two kinds.
    """

    def __init__(self, rng: np.random.Generator, size: Size, number: int) -> None:
        self.rng, self.n, self.d = rng, size.tokens, size.head_dim
        self.number, self.odd = number, number % 2 == 1
        self.heads, self.group, self.queries = size.kv_heads, size.group, size.queries * size.group
        self.amounts = np.zeros((self.n, ROLES), np.float32)
        self.noise = rng.standard_normal((self.n, self.d), np.float32)
        self.offset = np.zeros(self.d, np.float32)
        self.values = 0.5 * self.direction() + rng.standard_normal((self.n, self.d), np.float32)
        self.strengths = np.zeros((self.queries, ROLES), np.float32)
        self.changed: Float32 | None = None
        self.query_noise = FLAT_NOISE, FLAT_NOISE

    def direction(self) -> Float32:
        """A random vector as long as a value's noise."""
        x = self.rng.standard_normal(self.d).astype(np.float32)
        return np.asarray(x / np.linalg.norm(x) * math.sqrt(self.d), np.float32)

    def scattered(self, count: int) -> npt.NDArray[np.int64]:
        """Tokens outside of every window, each in a page of its own as far as there are pages."""
        first, pages = 2 * PAGE, self.n // PAGE - 8
        starts = first + PAGE * self.rng.permutation(pages)
        places = [starts + self.rng.integers(0, PAGE, pages) for _ in range(-(-count // pages))]
        return np.unique(np.concatenate(places))[:count] if count > pages else places[0][:count]

    def region(self, part: int, parts: int) -> slice:
        """One of so many equal ranges of whole pages between the windows."""
        first, length = 2 * PAGE, (self.n // PAGE - 8) // parts * PAGE
        return slice(first + part * length, first + (part + 1) * length)

    def of_no_role(self, tokens: slice) -> npt.NDArray[np.int64]:
        """Those of the tokens that have no amount of any role yet."""
        return tokens.start + np.flatnonzero(~self.amounts[tokens].any(axis=1))

    def logit_of(self, mass: float | Float32, count: int) -> Float32:
        """The logit that gives `count` tokens of equal logits that mass together, where all others have about 0."""
        others = (self.n - count) * math.exp(FLAT_NOISE**2 / 2)
        return np.log(np.asarray(mass) / (1 - np.asarray(mass)) * others / count).astype(np.float32)

    def masses(self, low: float, high: float) -> Float32:
        """A mass for each query."""
        return self.rng.uniform(low, high, self.queries).astype(np.float32)

    def finished(self) -> tuple[Float32, list[Float32]]:
        """Keys `[n, head_dim]`, and queries `[m, head_dim]` before and, if there is one, after the change."""
        roles = self.amounts.shape[1]
        basis = np.linalg.qr(self.rng.standard_normal((self.d, roles)))[0].T.astype(np.float32)
        noise = self.noise - (self.noise @ basis.T) @ basis
        keys = noise + self.amounts @ basis + self.offset
        asked = [self.strengths] + ([] if self.changed is None else [self.changed])
        return keys, [self._asking(strengths, basis, noise) for strengths, noise in zip(asked, self.query_noise, strict=False)]

    def _asking(self, strengths: Float32, basis: Float32, deviation: float) -> Float32:
        noise = deviation * self.rng.standard_normal((len(strengths), self.d), np.float32)
        clean = noise - (noise @ basis.T) @ basis
        return np.asarray(math.sqrt(self.d) * (strengths @ basis) + clean, np.float32)


def sharp(head: Head, mass: float = 0.995) -> None:
    """Fifty tokens of graded weights have nearly all of the mass: what a search finds well, to compare with."""
    tokens = head.scattered(50)
    head.amounts[tokens, 0] = 1 - 0.15 * np.arange(len(tokens)) / len(tokens)
    head.strengths[:, 0] = head.logit_of(mass, len(tokens)) + head.masses(0.5, 1.5)
    head.values[tokens] += head.direction()


def sink(head: Head) -> None:
    """A sink with 90 to 99 % of the mass and next to no value, beside a flat rest. It lies in the window, or outside of it."""
    token = head.n // 3 if head.odd else 3
    head.amounts[token, 0] = 1
    head.values[token] *= 1e-3
    head.strengths[:, 0] = head.logit_of(head.masses(0.9, 0.99), 1)


def needles(head: Head) -> None:
    """Two hundred tokens, each in a page of its own, with most of the output, behind 64 decoys of larger weight and no value; odd
    heads also have a sink so large that the needles lie outside of any range."""
    tokens = head.rng.permutation(head.scattered(264))
    wanted, decoys = tokens[:200], tokens[200:]
    head.amounts[wanted, 0], head.amounts[decoys, 0] = 1, 1.1
    head.values[decoys] *= 1e-2
    head.values[wanted] += 3 * head.direction()
    head.strengths[:, 0] = head.logit_of(head.masses(0.4, 0.6), 200)
    if head.odd:
        head.amounts[head.n // 3, 1] = 1
        head.values[head.n // 3] *= 1e-3
        head.strengths[:, 1] = head.strengths[:, 0] + 6


def cancelling(head: Head) -> None:
    """A region has the mass, evenly, and large values that cancel: neighbours do, in odd heads pages do."""
    region = head.region(2, 8)
    head.amounts[region, 0] = 1
    length = region.stop - region.start
    turns = np.arange(length) // (PAGE if head.odd else 1) % 2
    head.values[region] += (4 * (1 - 2 * turns))[:, None] * head.direction()
    head.strengths[:, 0] = head.logit_of(head.masses(0.9, 0.97), length)


def to_diffuse(head: Head) -> None:
    """Sharp heads that come to look at everything alike."""
    sharp(head)
    head.changed = np.zeros_like(head.strengths)


def to_another_region(head: Head) -> None:
    """Sharp heads that come to look at a sink of no value, and a whole region under its range."""
    sharp(head)
    region, token = head.of_no_role(head.region(1, 16)), head.n // 2
    head.amounts[region, 1] = 1
    head.amounts[token, 1] = 2.2
    head.values[region] += head.direction()
    head.values[token] *= 1e-3
    head.changed = np.zeros_like(head.strengths)
    head.changed[:, 1] = 5


def to_large_values(head: Head) -> None:
    """Sharp heads that miss the same small mass, first of usual values, then of values that are far larger."""
    _quiet_and_loud(head)
    head.changed = head.strengths.copy()
    head.changed[:, 1:] = head.strengths[:, :0:-1]


def one_to_large_values(head: Head) -> None:
    """The same of the last head alone: the others go on as they did."""
    to_large_values(head)
    if head.number < head.heads - 1:
        head.changed = head.strengths.copy()


def moods(head: Head) -> None:
    """Sharp heads of which each now and then, by itself, misses a small mass of large values: seldom enough for one head's
    95th percentile, too often for that of all heads together."""
    _quiet_and_loud(head)
    loud = np.tile(head.rng.random(head.queries // head.group) < MOODS_SHARE, head.group)
    head.strengths[loud, 1:] = head.strengths[loud, :0:-1]


def heavy_channels(head: Head) -> None:
    """Sharp heads whose keys have large offsets in a few channels, which say little of their weights, and outliers."""
    sharp(head, 0.9)
    channels = head.rng.choice(head.d, 4, replace=False)
    head.offset[channels] = head.rng.choice([-1, 1], 4) * head.rng.uniform(20, 40, 4)
    head.noise[:, channels] *= 4
    head.noise[head.rng.random(head.n) < 0.005] *= 8


def change_of_queries(head: Head, sink: float = 0.0) -> None:
    """Queries that each ask for one of some directions, and then for all at once, beside much noise; the values of later
    tokens lie elsewhere. sink: the logit of a sink of no value, 0 for none."""
    rng = head.rng
    head.amounts = np.zeros((head.n, DIRECTIONS + 1), np.float32)
    marked = np.flatnonzero(rng.random(head.n) < 0.03)
    head.amounts[marked, rng.integers(0, DIRECTIONS, len(marked))] = 1
    head.amounts[3] = 0
    head.noise *= 0.5
    head.values = rng.standard_normal((head.n, head.d)).astype(np.float32)
    head.values[head.n // 2 :] += 3
    head.strengths = np.zeros((head.queries, DIRECTIONS + 1), np.float32)
    asked = np.tile(rng.integers(0, DIRECTIONS, head.queries // head.group), head.group)
    head.strengths[np.arange(head.queries), asked] = rng.uniform(12.2, 13.2, head.queries)
    head.changed = (4.8 * rng.standard_normal(head.strengths.shape)).astype(np.float32)
    head.query_noise = FLAT_NOISE, 6.0
    head.changed[:, DIRECTIONS] = 0
    if sink:
        head.amounts[3, DIRECTIONS] = 1
        head.values[3] *= 1e-3
        head.strengths[:, DIRECTIONS] = head.changed[:, DIRECTIONS] = sink


def change_behind_a_sink(head: Head) -> None:
    """The same behind a sink with most of the mass."""
    change_of_queries(head, sink=20.0)


def _quiet_and_loud(head: Head) -> None:
    """Sharp, with a fifth of a percent of the mass on a region of usual values; another region, which is not asked for, has
    values sixty times as large."""
    sharp(head, 0.9999)
    quiet, loud = (head.of_no_role(head.region(part, 8)) for part in (1, 5))
    head.amounts[quiet, 1], head.amounts[loud, 2] = 1, 1
    head.values[loud] += 60 * head.direction()
    rest = np.exp(head.strengths[:, 0]) * 50 / len(quiet)  # a token of the region alone would have all of that
    head.strengths[:, 1] = np.log(0.002 * rest)


ADVERSARIES: Mapping[str, Callable[[Head], None]] = {
    "sharp": sharp,
    "sink": sink,
    "needles": needles,
    "cancelling": cancelling,
    "to diffuse": to_diffuse,
    "to another region": to_another_region,
    "to large values": to_large_values,
    "one to large values": one_to_large_values,
    "change of queries": change_of_queries,
    "change behind a sink": change_behind_a_sink,
    "moods": moods,
    "heavy channels": heavy_channels,
}


def make(name: str, size: Size, seed: int = 0) -> Adversary:
    """A layer of such heads, by a name of ADVERSARIES. Equal arguments give equal arrays."""
    keys, values, asked = [], [], []
    for number in range(size.kv_heads):
        head = Head(np.random.default_rng([seed, number]), size, number)
        ADVERSARIES[name](head)
        k, queries = head.finished()
        keys.append(k.astype(BFLOAT16))
        values.append(head.values.astype(BFLOAT16))
        asked.append(queries)
    q_heads = size.kv_heads * size.group
    pools = [
        np.concatenate(pool).reshape(q_heads, size.queries, size.head_dim).astype(BFLOAT16) for pool in zip(*asked, strict=True)
    ]
    return Adversary(name, np.stack(keys), np.stack(values), pools[0], pools[1] if len(pools) > 1 else None)
