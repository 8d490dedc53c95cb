"""Facts made by hand, and facts made up."""

from math import inf

from hypothesis import strategies as st

from indexes.retrieval import Dipr, Exact, TopK, TopP
from query_optimizer.facts import Facts, FastMemory, HeadFacts, IndexFacts, PartFacts
from query_optimizer.head_shares import share_budget
from query_optimizer.query_options import Hints, QueryOptions
from query_optimizer.ways import LayerBudget, Way, WayFacts

KV_HEADS, TOKEN_NBYTES, SINKS, RECENT = 4, 1024, 64, 256
SECONDS = TOKEN_NBYTES / 25e9
"""The time to read one token."""
SCANS = {"flat": (1e-8, False), "coarse-bounds": (5e-9, False), "coarse-means": (4e-9, False), "coarse-clusters": (3e-9, True)}
CALM, WILD = HeadFacts(9, 40), HeadFacts(9, 40_000)


def index(kind, tokens, **changed):
    """An index over so many tokens; what a search takes grows with them, but for a graph."""
    if kind == "hnsw":
        made = {"seconds": 1e-4, "nbytes": 2e5, "kept_nbytes": 400 * tokens, "walks": True}
    else:
        each, tail = SCANS[kind]
        seconds = each * tokens
        made = {
            "seconds": seconds,
            "nbytes": 40 * tokens,
            "kept_nbytes": 100 * tokens,
            "tail_seconds": 2 * seconds if tail else None,
        }
    made |= changed
    return IndexFacts(kind, sharp_seconds=changed.get("sharp_seconds", made["seconds"] / 2), **made)


def part(name="segment 3", visible=50_000, *kinds, stored=None, **changed):
    """A stored part with these kinds of index; () for none."""
    begin, end = (SINKS, (visible - RECENT) // 64 * 64) if visible >= 2048 else (0, 0)
    indexes = tuple(index(kind, end - begin) for kind in kinds) if end else ()
    made = {"begin": begin, "end": end, "indexes": indexes, "seconds": visible * SECONDS, "tier": "cpu"} | changed
    return PartFacts(name, visible, visible if stored is None else stored, **made)


def tail(tokens=20):
    return PartFacts("tail", tokens, tokens, "cpu", tokens * SECONDS, is_tail=True)


def facts(*parts, **changed):
    made = {"layer": 12, "layers": 32, "new_tokens": 1, "kv_heads": KV_HEADS, "group": 4, "token_nbytes": TOKEN_NBYTES}
    made |= {"window_tokens": SINKS + RECENT, "call_seconds": 3e-5, "step_seconds": 4e-4}
    return Facts(parts=parts, **made | changed)


RETRIEVALS = (None, None, None, Exact(), Dipr(0.05), TopK(50), TopP(0.9))
KINDS = (*SCANS, "hnsw")
SOME = (True, False, False)


def made_part(choose, name):
    """A part of which every number is chosen from a few, by `choose(options)`."""
    is_tail = name == "tail"
    visible = choose([1, 30, 700, 3000, 5000, 20_000, 100_000, 400_000])
    long = visible >= 2048 and not (is_tail and choose(SOME))
    begin = choose([0, SINKS]) if long and not is_tail else 0
    end = (visible - choose([0, 1, RECENT])) // 64 * 64 if long else 0
    kinds = {choose(KINDS) for _ in range(choose([0, 1, 2, 3]))} if end else ()
    indexes = tuple(index(kind, end - begin, seconds=choose([1e-6, 1e-4, 1e-3, 1e-2])) for kind in sorted(kinds))
    known = end and choose([True, False])
    heads = [HeadFacts(choose([0.0, 5.0]), choose([3.0, 1e3, 1e5]), choose([0.0, 0.0, 0.9])) for _ in range(known and KV_HEADS)]
    return PartFacts(
        name=name,
        visible=visible,
        stored=visible if is_tail else visible * choose([1, 1, 3]),
        tier="cpu",
        seconds=visible * SECONDS,
        begin=begin,
        end=end,
        indexes=indexes,
        heads=tuple(heads),
        building=(choose(KINDS),) if choose(SOME) else (),
        shift=choose([0, 0, 7]),
        is_tail=is_tail,
    )


def proven(way, bound, audits=180, time_share=0.2, **changed):
    """What is known of a way that errs by no more than `bound` on every KV head."""
    made = {"audits": (audits,) * KV_HEADS, "bounds": (bound,) * KV_HEADS, "least": (bound / 2,) * KV_HEADS}
    return WayFacts(
        way, **{**made, "given_up": (0.0,) * KV_HEADS, "waits": (False,) * KV_HEADS, "time_share": time_share, **changed}
    )


def budget(error_max, *ways):
    return LayerBudget(error_max, ways, share_budget(error_max, ways, KV_HEADS))


def made_budget(choose):
    """A budget with a few ways, each proven for some heads."""
    ways = [Way(choose(KINDS), choose([Dipr(), TopK(64)]), choose([True, False])) for _ in range(choose([0, 1, 2]))]
    bounds = [tuple(choose([0.0, 1e-3, 0.02, inf]) for _ in range(KV_HEADS)) for _ in ways]
    known = [
        proven(way, 0.0, bounds=bound, time_share=choose([None, 0.1, 0.5, 1.2])) for way, bound in zip(ways, bounds, strict=True)
    ]
    return budget(choose([0.0, 0.01, 0.05]), *known)


def made_facts(choose):
    """Facts of up to three parts, of which the last may be a tail."""
    names = [f"segment {number}" for number in range(choose([0, 1, 1, 2]))] + ["tail"] * choose(SOME)
    hints = Hints(choose([None, None, *KINDS]), (), choose([None, None, 1 << 19, 1 << 22, 1 << 30]))
    options = QueryOptions(choose(RETRIEVALS), choose([0.01, None, None]), choose(SOME), hints)
    return facts(
        *[made_part(choose, name) for name in names],
        layer=choose([0, 1, 12]),
        new_tokens=choose([1, 1, 5, 100]),
        fast=choose([None, None, FastMemory("gpu", 0), FastMemory("gpu", 1 << 22), FastMemory("gpu", 1 << 33)]),
        options=options,
        budget=made_budget(choose) if options.budgeted and choose([True, False]) else None,
    )


@st.composite
def any_facts(draw):
    return made_facts(lambda options: draw(st.sampled_from(options)))
