"""What do many sessions on one stored segment cost, beside one? Each has a short tail of its own."""

from __future__ import annotations

import torch

from benchmarks.gpu import reference
from benchmarks.gpu.cache import Cache, asking, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding
from benchmarks.gpu.results import Results
from kvdb.attention.triton.batch import Piece

RATIO_MAX = 2.5
TAIL_TOKENS = 100


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    k, v = random(card, seed, 1, sizes.tokens)
    tails = random(card, seed + 1, sizes.sharing, TAIL_TOKENS)
    queries, exacts = [], []
    for i in range(sizes.sharing):
        keys, values = (torch.cat([shared[0], own[i]], dim=1) for shared, own in zip((k, v), tails, strict=True))
        queries.append(asking(card, seed + 2 + i, [keys]))
        exacts.append(reference.attention(queries[i][0], keys, values, sizes.head_dim**-0.5))
    cache = Cache(card, [*k, *tails[0]], [*v, *tails[1]], seed)
    segment = Piece(cache.slots[0], cache.tokens[0], key="segment")
    pieces = [[segment, Piece(slots, TAIL_TOKENS)] for slots in cache.slots[1:]]
    runs = {count: Decoding(card, cache, torch.cat(queries[:count]), pieces[:count]) for count in (1, sizes.sharing)}
    truths = {count: reference.stacked(exacts[:count]) for count in runs}
    errors = {count: decoding.check(f"{count} sessions on one segment", truths[count]) for count, decoding in runs.items()}
    times = card.time({str(count): decoding for count, decoding in runs.items()})
    for count, decoding in runs.items() if times else ():
        decoding.check(f"{count} sessions on one segment, after they were timed", truths[count])
    case = f"{sizes.tokens:,} tokens shared"
    for count in runs:
        fields: dict[str, object] = {"error": errors[count]}
        if count > 1:
            fields["reach"] = f"<= {RATIO_MAX} x one"
        if times:
            ratio = times[str(count)] / times["1"]
            fields |= {"ms": times[str(count)], **({"ratio": ratio, "holds": ratio <= RATIO_MAX} if count > 1 else {})}
        results.add(case, f"{count} session{'s' * (count > 1)}", **fields)
