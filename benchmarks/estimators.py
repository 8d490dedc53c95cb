"""Ways to answer a head from less than all of its keys and values, in numpy: what `benchmarks.estimates` compares.

Each way yields its name with the output of every query, `[rows, m, head_dim]`, and the share of the bytes that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from indexes.blocks import Blocks
from indexes.coarse.clusters import Clusters

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Answers = Iterator[tuple[str, tuple[Array, float]]]
SINKS, WINDOW = 4, 128
SHARES = (1 / 4, 1 / 3, 1 / 2)
CHUNK = 1024


class Head:
    """One KV head, its queries, and exact attention. Tokens [SINKS, stop) may be estimated; the others are always read.

    q: `[rows, m, head_dim]`. k, v: `[n, head_dim]`. seen: how many tokens each query sees, all for None.
    """

    def __init__(self, q: Array, k: Array, v: Array, stop: int, seen: npt.NDArray[np.int64] | None = None) -> None:
        self.q, self.scale, self.tokens = q, q.shape[-1] ** -0.5, stop
        rest = np.r_[0:SINKS, stop : len(k)]
        self.k, self.v = k[SINKS:stop], v[SINKS:stop]
        read = self.scale * (q @ k[rest].T)
        if seen is not None:
            read[:, rest[None, :] >= seen[:, None]] = -np.inf
        logits = self.scale * (q @ self.k.T)
        self.top = np.maximum(logits.max(-1), read.max(-1))[..., None]
        self.weights, window = np.exp(logits - self.top), np.exp(read - self.top)
        self.window_mass, self.window_out = window.sum(-1), window @ v[rest]
        self.out = self.answer(self.weights, self.v)

    def answer(self, weights: Array, values: Array, exact: Mask | None = None) -> Array:
        """Attention with these weights and values, but for tokens that are read as they are, bool `[rows, m, tokens]`."""
        mass, out = self.window_mass, self.window_out
        if exact is not None:
            chosen = np.where(exact, self.weights, 0)
            mass, out = mass + chosen.sum(-1), out + chosen @ self.v
            weights = np.where(exact, 0, weights)
        out = (out + weights @ values) / (mass + weights.sum(-1))[..., None]
        return np.asarray(out, np.float32)

    def nbytes(self, each: float, exact: Mask | None = None) -> float:
        """The share of the bytes where `each` are read of every token, and keys and values of those that some row reads."""
        whole = 4.0 * self.k.shape[1]
        read = 0.0 if exact is None else float(exact.any(0).mean())
        return each / whole + read + (SINKS + WINDOW) / self.tokens


def layer_error(heads: list[Head], outs: list[Array]) -> Array:
    """The error of each query over all heads, relative."""
    wrong = sum(((out - head.out) ** 2).sum((0, 2)) for head, out in zip(heads, outs, strict=True))
    return np.asarray(np.sqrt(wrong / sum((head.out**2).sum((0, 2)) for head in heads)))


def errors(error: Array) -> dict[str, float]:
    return {"error_p50": float(np.median(error)), "error_p95": float(np.quantile(error, 0.95)), "error_max": float(error.max())}


def kept(head: Head) -> Answers:
    """Tokens that are read, by an oracle, and nothing of the others: the least that finding them could cost."""
    none = np.zeros_like(head.weights)
    for alpha in (0.1, 0.012):
        exact = head.weights >= alpha * head.weights.max(-1, keepdims=True)
        yield f"only dipr({alpha:g})", (head.answer(none, head.v, exact), head.nbytes(0, exact))
    for k in (64, 256):
        exact = top(head.weights, k)
        yield f"only top_k({k})", (head.answer(none, head.v, exact), head.nbytes(0, exact))
    for p in (0.9, 0.98):
        order = np.argsort(-head.weights, -1)
        sums = np.take_along_axis(head.weights, order, -1).cumsum(-1)
        exact = np.zeros(head.weights.shape, bool)
        needed = p * (head.weights.sum(-1) + head.window_mass) - head.window_mass
        before = np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums[..., :-1]], -1)
        np.put_along_axis(exact, order, before < needed[..., None], -1)
        yield f"only top_p({p:g})", (head.answer(none, head.v, exact), head.nbytes(0, exact))


def top(weights: Array, k: int) -> Mask:
    return np.asarray(weights >= -np.partition(-weights, k - 1, -1)[..., k - 1 : k])


def codes(head: Head) -> Answers:
    """Keys and values by short codes, rotated and less the mean of their chunk; tokens of large weight as they are."""
    keys = {bits: coded(head.k, bits) for bits in (8, 4)}
    values = {bits: coded(head.v, bits) for bits in (8, 4, 3, 2)}
    d = head.k.shape[1]
    for key_bits, value_bits in ((8, 8), (8, 4), (4, 8), (4, 4), (4, 3), (4, 2)):
        weights = np.exp(head.scale * (head.q @ keys[key_bits].T) - head.top)
        each = d * (key_bits + value_bits) / 8 + 4
        name = f"{key_bits}-bit keys, {value_bits}-bit values"
        yield name, (head.answer(weights, values[value_bits]), head.nbytes(each))
        for k in (16, 64):
            exact = top(weights, k)
            yield f"{name}, top_k({k})", (head.answer(weights, values[value_bits], exact), head.nbytes(each, exact))
        for share in (3e-3, 1e-3):
            exact = weights > share * (weights.sum(-1) + head.window_mass)[..., None]
            yield f"{name}, weight > {share:g}", (head.answer(weights, values[value_bits], exact), head.nbytes(each, exact))
    weights = np.exp(head.scale * (head.q @ coded(head.k, 4, rotated=False).T) - head.top)
    exact, plain = top(weights, 64), coded(head.v, 4, rotated=False)
    yield "4-bit keys, 4-bit values, not rotated, top_k(64)", (head.answer(weights, plain, exact), head.nbytes(d + 4, exact))


def coded(x: Array, bits: int, *, rotated: bool = True) -> Array:
    """What codes of so many bits leave of rows."""
    turn, out, middle = hadamard(x.shape[1]) if rotated else np.eye(x.shape[1], dtype=np.float32), np.empty_like(x), 2**bits - 1
    for begin in range(0, len(x), CHUNK):
        piece = x[begin : begin + CHUNK]
        centre = piece.mean(0)
        turned = (piece - centre) @ turn
        step = np.maximum(np.abs(turned).max(1, keepdims=True) * 2 / middle, 1e-30)
        code = np.clip(np.floor(turned / step) + 0.5, -middle / 2, middle / 2)
        out[begin : begin + CHUNK] = (code * step) @ turn.T + centre
    return out


def hadamard(n: int) -> Array:
    """An orthogonal matrix of a power of two, with random signs."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return np.asarray(np.random.default_rng(0).choice([-1, 1], n)[:, None] * h / np.sqrt(n), np.float32)


class Grouped:
    """Clusters of a head's tokens, and what may be kept of each."""

    def __init__(self, head: Head, size: int) -> None:
        n = len(head.k)
        index = Clusters.build(Blocks.of(head.k[None], head.v[None]), page_size=size)
        self.of = np.empty(n, np.int64)
        pages = 0
        for batch in index._batches:
            for s in range(batch.segments):
                first, begin = batch.arrays["first"][s, 0], batch.begin + s * batch.tokens
                members = begin + batch.arrays["members"][s, 0].astype(np.int64)
                self.of[members] = pages + np.repeat(np.arange(len(first) - 1), np.diff(first))
                pages += len(first) - 1
        self.count = np.maximum(np.bincount(self.of, minlength=pages), 1).astype(np.float32)
        self.k, self.v = self.mean(head.k), self.mean(head.v)
        self.rest = head.k - self.k[self.of]
        self.square = self.mean(self.rest**2)

    def mean(self, x: Array) -> Array:
        sums = np.zeros((len(self.count), x.shape[1]), np.float32)
        np.add.at(sums, self.of, x)
        return np.asarray(sums / self.count[:, None])

    def sums(self, x: Array) -> Array:
        """Values of `[rows, tokens]`, summed up over clusters."""
        return np.stack([np.bincount(self.of, row, len(self.count)) for row in x]).astype(np.float32)


def clusters(head: Head) -> Answers:
    """The clusters of the largest weight as they are, centroids for the rest; with more and more kept of each cluster.

    Whole covariances would be more bytes than the tokens: they show what they could do if they were free.
    """
    d, rows = head.k.shape[1], head.q.shape[:2]
    q = head.q.reshape(-1, d)
    for size in (16, 32):
        groups = Grouped(head, size)
        middle = head.scale * (q @ groups.k.T) - head.top.reshape(-1, 1)
        spread = {
            "centroids": (np.zeros_like(middle), 3 * d),
            "centroids, variance by channel": (head.scale**2 / 2 * (q**2 @ groups.square.T), 4 * d),
        }
        around = head.scale * np.stack([(groups.rest @ row) for row in q])
        true = groups.sums(around**2) / groups.count / 2
        spread["centroids, whole covariance for free"] = (true, 3 * d)
        for name, (more, kept_nbytes) in spread.items():
            mass = groups.count * np.exp(np.minimum(middle + more, 0))
            for first_order in (False, True):
                yield from _read_largest(head, groups, (f"{name}, {size} tokens", kept_nbytes), mass, around, first_order, rows)


def _read_largest(
    head: Head, groups: Grouped, way: tuple[str, int], mass: Array, around: Array, first_order: bool, rows: tuple[int, ...]
) -> Answers:
    d = head.k.shape[1]
    name, each = way[0] + (", covariance of values for free" if first_order else ""), way[1]
    of, per_row = groups.of, mass[:, groups.of] / groups.count[groups.of]
    if first_order:  # values go with the keys' products: Cov(v, k) q, exactly
        per_row = per_row * (1 + around)
    scanned = each / groups.count.mean()
    for share in SHARES:
        budget = share - (scanned / (4 * d) + (SINKS + WINDOW) / head.tokens)
        if budget <= 0:
            continue
        together = (mass / mass.sum(1, keepdims=True)).reshape(*rows, -1).max(0)  # rows share what they read
        order = np.argsort(-together, -1)
        sizes = groups.count[order].cumsum(-1) <= budget * len(of)
        chosen = np.zeros(together.shape, bool)
        np.put_along_axis(chosen, order, sizes, -1)
        exact = np.broadcast_to(chosen[:, of], (*rows, len(of)))
        values = head.v if first_order else groups.v[of]
        out = head.answer(per_row.reshape(*rows, -1), values, exact)
        if first_order:  # the mass is not what goes with values
            out = _renormalised(head, mass[:, of] / groups.count[of], per_row, exact, rows)
        yield f"{name}, to {share:.2f}", (out, head.nbytes(scanned, exact))


def _renormalised(head: Head, mass: Array, with_values: Array, exact: Mask, rows: tuple[int, ...]) -> Array:
    chosen = np.where(exact, head.weights, 0)
    rest, values = (np.where(exact, 0, x.reshape(*rows, -1)) for x in (mass, with_values))
    total = head.window_mass + chosen.sum(-1) + rest.sum(-1)
    return np.asarray((head.window_out + (chosen + values) @ head.v) / total[..., None], np.float32)


def sampled(head: Head) -> Answers:
    """The largest 64 by an oracle, and tokens drawn from clusters by their centroids' weights (after MagicPIG, 2410.16179)."""
    d, rows, rng = head.k.shape[1], head.q.shape[:2], np.random.default_rng(0)
    groups = Grouped(head, 32)
    logits = head.scale * (head.q @ groups.k.T) - head.top
    proposal = np.exp(logits)[..., groups.of] + 1e-12
    exact = top(head.weights, 64)
    proposal = np.where(exact, 0, proposal)
    proposal /= proposal.sum(-1, keepdims=True)
    for share in SHARES:
        count = int(share * len(head.k) / rows[0])
        weights = np.zeros_like(head.weights)
        for at in np.ndindex(*rows):
            drawn = rng.choice(len(head.k), count, p=proposal[at] / proposal[at].sum())
            np.add.at(weights[at], drawn, head.weights[at][drawn] / (count * proposal[at][drawn]))
        read = exact | (weights > 0)
        yield f"sampled by clusters, {share:.2f}", (head.answer(weights, head.v, exact), head.nbytes(2 * d / 32, read))
