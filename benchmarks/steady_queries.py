"""What does it cost steady queries that each is asked whether it is like those for which its ways were proven?

    python -m benchmarks.steady_queries

Sharp heads are decoded from by the default, once its ways are proven, in turns with and without the ranges of signs
(`kvdb.planning.budget.ranges_of`) in its plans. `steady_queries`: the median microseconds a step of each, how far apart their
turns' medians lie, and their ratio. Asked: at most 1.03.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np

import kvdb
from benchmarks.adversarial import Stored
from benchmarks.adversaries import Size, make
from benchmarks.harness import machine, report
from benchmarks.real_model_ways import at_any_price
from kvdb.planning import planner
from kvdb.planning.budget import ranges_of

PROVING, WARMING = 400, 32


def steps(stored: Stored, number: int, seed: int) -> tuple[list[float], dict[str, int]]:
    """The microseconds of that many steps of a new session, and by which ways they were answered."""
    rng, adversary, spent = np.random.default_rng(seed), stored.adversary, list[float]()
    with stored.session() as session:
        for step in range(WARMING + number):
            chosen = int(rng.integers(adversary.before.shape[1]))
            q = np.ascontiguousarray(adversary.before[:, chosen, None])
            k, v = (np.ascontiguousarray(array[:, -1 - step % 256, None]) for array in (adversary.k, adversary.v))
            began = perf_counter()
            session.attend(0, q, k, v, options=kvdb.QueryOptions(error_max=0.02))
            spent.append(1e6 * (perf_counter() - began))
        return spent[WARMING:], dict(session.stats().ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=400, help="of a turn")
    parser.add_argument("--turns", type=int, default=12, help="of each")
    given = parser.parse_args()
    stored = Stored(make("sharp", Size(given.tokens, kv_heads=2, group=4)))
    with at_any_price():
        steps(stored, PROVING, 0)
    turns: dict[str, list[float]] = {"with": [], "without": []}
    ways: dict[str, dict[str, int]] = {}
    for turn in range(given.turns):
        for how in sorted(turns, reverse=bool(turn % 2)):
            with patch.object(planner, "ranges_of", ranges_of if how == "with" else lambda *_: None):
                spent, ways[how] = steps(stored, given.steps, turn + 1)
            turns[how].append(median(spent))
    stored.close()
    report("machine", **machine())
    each = {how: {"us": median(found), "from": min(found), "to": max(found), "ways": ways[how]} for how, found in turns.items()}
    ratio = median(mine / plain for mine, plain in zip(turns["with"], turns["without"], strict=True))
    report("steady_queries", tokens=given.tokens, **each, ratio=ratio)


if __name__ == "__main__":
    main()
