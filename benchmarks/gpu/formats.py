"""What do pages in 8 bits save, and what do they cost in precision?"""

from __future__ import annotations

from benchmarks.gpu import reference
from benchmarks.gpu.bandwidth import COPIED_BYTES, SMALL_BYTES, Copying
from benchmarks.gpu.cache import Cache, asking, nbytes, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.decode import figures
from benchmarks.gpu.decoding import Decoding, exact
from benchmarks.gpu.results import Results

FORMATS = ("bfloat16", "float8", "int8")


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    if not card.room_for(sum(nbytes(sizes, sizes.sessions, sizes.tokens, name) for name in FORMATS)):
        results.skip(f"batch {sizes.sessions}", "it does not fit the card")
        return
    k, v = random(card, seed, sizes.sessions, sizes.tokens)
    q = asking(card, seed, list(k))
    scale = sizes.head_dim**-0.5
    unrounded = reference.stacked([reference.attention(q[i], k[i], v[i], scale) for i in range(len(q))])
    runs = {name: Decoding(card, Cache(card, k, v, seed, name), q) for name in FORMATS}
    case = f"batch {sizes.sessions}, {sizes.tokens:,} tokens"
    # Right is what attention over the format's own numbers gives; what the format itself costs is told beside it.
    errors = {
        name: decoding.check(f"decode of {name} pages, {case}", exact(decoding.cache, q)) for name, decoding in runs.items()
    }
    copying = Copying(card, SMALL_BYTES if card.small else COPIED_BYTES)
    times = card.time({"copy": copying, **runs})
    for name, decoding in runs.items():
        away, worst = reference.off(decoding.out, unrounded.out)
        fields = figures(decoding.cache, copying, times, name)
        if times and name != "bfloat16":
            fields["ratio"] = times["bfloat16"] / times[name]
        note = f"{away:.2%} from attention in bfloat16, {worst:.2%} at worst" if name != "bfloat16" else ""
        results.add(case, name, **fields, error=errors[name], note=note)
