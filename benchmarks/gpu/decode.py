"""How fast is exact attention over pages, beside what a copy reaches and beside what others offer?"""

from __future__ import annotations

from benchmarks.gpu import reference
from benchmarks.gpu.bandwidth import COPIED_BYTES, SMALL_BYTES, Copying
from benchmarks.gpu.baselines import COMPILED, Attend, Refused, makers, refusals
from benchmarks.gpu.cache import Cache, asking, nbytes, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding, exact
from benchmarks.gpu.results import Results

OF_COPY_MIN = 0.85
BESIDE_BYTES = 4 << 30
"""What the reference and the others need beside keys and values, at most."""
COMPILING_SECONDS_MAX = 90.0
"""Behind which nothing more is compiled for comparison, so that time is left for the rest."""


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    copied = SMALL_BYTES if card.small else COPIED_BYTES
    for batch in sizes.batches:
        case = f"batch {batch}, {sizes.tokens:,} tokens"
        needed = nbytes(sizes, batch, sizes.tokens) + 2 * copied + BESIDE_BYTES
        if not card.room_for(needed):
            results.skip(case, f"it takes {needed / 2**30:.1f} GiB of the card")
            continue
        one(card, results, seed + batch, batch, case, Copying(card, copied))
        card.free()


def one(card: Card, results: Results, seed: int, batch: int, case: str, copying: Copying) -> None:
    cache = Cache(card, *random(card, seed, batch, card.sizes.tokens), seed)
    q = asking(card, seed, list(cache.k))
    decoding, truth = Decoding(card, cache, q), exact(cache, q)
    errors = {"kvdb": decoding.check(f"decode, {case}", truth)}
    others: dict[str, Attend] = {}
    for name, maker in makers(card).items():
        if name == COMPILED and card.seconds > COMPILING_SECONDS_MAX:
            results.skip(case, "no time is left for compiling it", name)
            continue
        try:
            with refusals():
                others[name] = maker(card, cache, q, decoding.scale)
                errors[name] = reference.check(name, others[name](), None, truth)
        except Refused as refused:
            others.pop(name, None)
            results.skip(case, str(refused), name)
    times = card.time({"copy": copying, "kvdb": decoding, **others})
    if times:
        decoding.check(f"decode, {case}, after it was timed", truth)
    results.add(case, "kvdb", **figures(cache, copying, times, "kvdb"), error=errors["kvdb"], **reached(copying, cache, times))
    for name in others:
        results.add(case, name, **figures(cache, copying, times, name), error=errors[name])
    if others and times:
        fastest = min(others, key=lambda name: times[name])
        ratio = times[fastest] / times["kvdb"]
        results.add(case, f"kvdb, beside {fastest}", ratio=ratio, reach=">= 1 x the fastest", holds=ratio >= 1)


def figures(cache: Cache, copying: Copying, times: dict[str, float], name: str) -> dict[str, object]:
    if not times:
        return {}
    gb_s = cache.nbytes / times[name] / 1e6
    return {"ms": times[name], "gb_s": gb_s, "of_copy": gb_s / copying.gb_s(times)}


def reached(copying: Copying, cache: Cache, times: dict[str, float]) -> dict[str, object]:
    held = {"holds": cache.nbytes / times["kvdb"] / 1e6 >= OF_COPY_MIN * copying.gb_s(times)} if times else {}
    return {"reach": f">= {OF_COPY_MIN:.0%} of copy", **held}
