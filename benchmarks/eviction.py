"""Which eviction policy keeps the most of a real load's prefixes?

    python -m benchmarks.eviction TRACE.jsonl [--gib 1 8 64 400] [--mib 1]

TRACE: requests in their order, one JSON object a line, whose `hash_ids` name the blocks of the prompt, as in Mooncake's traces
(github.com/kvcache-ai/Mooncake, 512 tokens a block). A block is hit where it and all blocks before it are held; a request's
blocks are held from then on, and the policy makes room. --mib: the size of a block. `hit_rate` is hit blocks beside all blocks,
`over_lru` is it beside that of LRU in points; `infinite` holds everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter

from benchmarks.harness import report
from kvdb.storage.eviction.base import EvictionPolicy
from kvdb.storage.eviction.lru import Lru
from kvdb.storage.eviction.reuse import Reuse

POLICIES: dict[str, type[EvictionPolicy[int]]] = {"lru": Lru, "reuse": Reuse}
TOKENS = 512
"""The number of tokens in a block of the trace."""


def main() -> None:
    given = arguments()
    if given.trace is None:
        report("trace", missing="give the file of a trace; see the module's own text")
        return
    requests = [json.loads(line)["hash_ids"] for line in given.trace.read_text().splitlines()]
    blocks = sum(map(len, requests))
    nbytes = int(given.mib * (1 << 20))
    report("trace", requests=len(requests), blocks=blocks, different=len({block for one in requests for block in one}))
    held = hits(Lru(), requests, nbytes, None)
    report("infinite", hit_rate=round(held / blocks, 4), hit_tokens=held * TOKENS)
    for gib in given.gib:
        lru = None
        for name, kind in POLICIES.items():
            begun = perf_counter()
            held = hits(kind(), requests, nbytes, int(gib * (1 << 30)))
            taken = perf_counter() - begun
            lru = held if lru is None else lru
            report(
                "policy",
                gib=gib,
                policy=name,
                hit_rate=round(held / blocks, 4),
                over_lru=round(100 * (held - lru) / blocks, 2),
                hit_tokens=held * TOKENS,
                touch_us=round(1e6 * taken / blocks, 1),
            )


def hits(policy: EvictionPolicy[int], requests: Sequence[Sequence[int]], nbytes: int, capacity: int | None) -> int:
    """How many blocks are hit with a policy that holds `capacity` bytes of blocks of `nbytes`; None for all of them."""
    held = 0
    for blocks in requests:
        held += sum(1 for _ in takewhile(policy.__contains__, blocks))
        for block in reversed(blocks):
            policy.touch(block, nbytes)
        while capacity is not None and policy.nbytes > capacity:
            policy.evict()
    return held


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 8, 64, 400])
    parser.add_argument("--mib", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
