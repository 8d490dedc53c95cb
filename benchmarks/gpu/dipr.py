"""What does attention by retrieval cost beside exact attention, with an output that is off by at most 1 %?

Sharp heads. The window (the first and the last tokens) is attended exactly and gives the first maximum; of the rest, codes say
what may lie within the range, and that is attended with its exact keys. alpha is the largest of ALPHAS whose output is near
enough, or else the last. Of a million tokens, those out of range have a mass of their own, however small alpha is: so it is
measured with and without a state for them in the merge, of the mass that the codes estimate.
"""

from __future__ import annotations

import torch

from benchmarks.gpu import reference
from benchmarks.gpu.cache import Cache, nbytes
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding, exact
from benchmarks.gpu.reference import Exact
from benchmarks.gpu.results import Results, Wrong
from benchmarks.gpu.retrieving import Retrieving, encode
from benchmarks.gpu.sharp import sharp

ALPHAS = (0.012, 0.004, 0.001, 0.0003)
ERROR_MAX = 0.01
BESIDE = 6
"""Times the keys and values of a sequence: what the reference takes beside them."""
ROUNDING = 1e-6
"""Relative, of a product in float32: so near the edge of the range, a token may be in it or not."""


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    for sessions, tokens, faster in ((sizes.sessions, sizes.tokens, 4.0), (1, sizes.long_tokens, 6.0)):
        case = f"{sessions} x {tokens:,} tokens, sharp heads"
        if not card.room_for(nbytes(sizes, sessions, tokens) + BESIDE * sizes.kv_nbytes(tokens)):
            results.skip(case, "it does not fit the card")
            continue
        one(card, results, seed, sessions, tokens, case, faster)
        card.free()


def one(card: Card, results: Results, seed: int, sessions: int, tokens: int, case: str, faster: float) -> None:
    made = [sharp(card, seed + i, tokens) for i in range(sessions)]
    k, v, q = (torch.stack([parts[i] for parts in made]) for i in range(3))
    del made
    cache = Cache(card, k, v, seed)
    encode(card, cache)
    decoding, truth = Decoding(card, cache, q), exact(cache, q)
    exact_error = decoding.check(f"exact, {case}", truth)
    ways = {"DIPR": False, "DIPR, tail estimated": True}
    chosen = {what: near_enough(card, cache, q, truth, tail, f"{what}, {case}") for what, tail in ways.items()}
    times = card.time({"exact": decoding, **{what: retrieving for what, (retrieving, _) in chosen.items()}})
    results.add(case, "exact", **({"ms": times["exact"]} if times else {}), error=exact_error)
    for what, (retrieving, error) in chosen.items():
        if times:
            checked(retrieving, cache, truth, f"{what}, {case}, after it was timed")
        found = float(retrieving.selection.counts.float().mean()) / (retrieving.end - retrieving.begin)
        note = f"alpha {retrieving.alpha:g}; outside of the window, a KV head attends {found:.2%} of the tokens"
        fields: dict[str, object] = {"error": error, "note": note}
        if times:
            ratio = times["exact"] / times[what]
            fields |= {"ms": times[what], "ratio": ratio, "holds": ratio >= faster and error <= ERROR_MAX}
        results.add(case, what, reach=f">= {faster:g} x exact, error <= {ERROR_MAX:.0%}", **fields)


def near_enough(card: Card, cache: Cache, q: torch.Tensor, truth: Exact, tail: bool, what: str) -> tuple[Retrieving, float]:
    """With the largest alpha whose output is near enough, or the smallest of all."""
    for alpha in ALPHAS:
        retrieving = Retrieving(card, cache, q, alpha, tail=tail)
        error = checked(retrieving, cache, truth, f"{what}, alpha {alpha:g}")
        if error <= ERROR_MAX:
            break
    return retrieving, error


def checked(retrieving: Retrieving, cache: Cache, truth: Exact, what: str) -> float:
    """The error against exact attention, after a fresh call. Raises Wrong where a token within the range was not attended, where
    the output is not that of what was attended, or where the bound on what was missed does not hold."""
    retrieving.poison()
    retrieving()
    expected, missed = [], []
    for i, q in enumerate(retrieving.q):
        kept, (k, v) = retrieving.attended(i), cache.loaded(i)
        least = truth.top[i] - retrieving.beta + ROUNDING * truth.top[i].abs()
        if count := reference.overlooked(q, k, kept, least):
            raise Wrong(f"{what}: {count} tokens within the range were not attended in sequence {i}")
        expected.append(reference.attention(q, k, v, retrieving.scale, kept))
        missed.append(reference.attention(q, k, v, retrieving.scale, ~kept).lse)
    attended = reference.stacked(expected)
    if retrieving.tail:
        attended = reference.merged(attended, retrieving.mean.double(), retrieving.selection.missed.double())
    reference.check(what, retrieving.out, retrieving.lse, attended)
    above = retrieving.selection.missed_bound.double() - torch.stack(missed)
    if not bool(((above >= -reference.LSE_MAX) | (torch.stack(missed) == -torch.inf)).all()):
        raise Wrong(f"{what}: what was missed is more than its bound, by a factor of {float(torch.exp(-above).max()):.4g}")
    return reference.off(retrieving.out, truth.out)[0]
