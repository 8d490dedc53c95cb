"""What a search over pages is expected to take: the scan of the representatives, the pages that are read, the rows that give up.

The constants here and those of each kind were fitted on the machine whose numbers are the defaults of
`query_optimizer.cost.Machine`, over 4 thousand to a million tokens of `benchmarks/workloads.py`. Operations are multiplications
of the attention kernel.
"""

import math
from dataclasses import dataclass
from math import ceil, sqrt

import indexes._native as _native
from indexes.base import Cost
from indexes.blocks import Blocks
from indexes.coarse.layout import Layout
from indexes.demand import Demand, rising
from indexes.retrieval import Exact, Retrieval, TopP

TILE = 16
"""Rows that share a read."""
USUAL_ROWS = 4
"""Of a KV head, for which a kind says how many tokens are read."""
WORTH, WORTH_POWER = 0.25, 4.0
"""Of the tokens: where pages hold a larger share, the KV head is left (`native/coarse/`)."""
RANKED_OPERATIONS = 23_000.0
"""Of each of the k of each row, for finding the pages that may hold them."""
RUN_JUMPS = 1.4
"""Of the keys that are read, for each that does not lie behind the one before it."""
RANKED_SCORE = 1.2
"""Times as much as in a range takes a key that is read, for keeping the best."""


@dataclass(frozen=True)
class Work:
    """The constants of a kind. scan: operations for each channel of a representative and row. tokens: of a sharp KV head that are
    read for a range, times alpha ** -growth, whatever their number. apart: keys that lie one behind the other. score: operations
    for each channel of a key that is read, and row. rank_page: for each page and row, where the k best are wanted. ranked: tokens
    that are read for them, times k ** ranked_power; None where nearly all are.
    """

    scan: float
    tokens: float
    growth: float
    apart: int
    score: float
    rank_page: float
    ranked: float | None
    ranked_power: float = 0.67

    def cost(
        self, layout: Layout, blocks: Blocks, asked: tuple[int, int, int], retrieval: Retrieval, wanted: float | None
    ) -> Cost:
        """asked: tokens, rows of each KV head, KV heads."""
        tokens, rows, heads = asked
        d, key_nbytes = blocks.head_dim, blocks.token_nbytes / 2
        tiles, pages = ceil(rows / TILE), ceil(tokens / layout.page_size)
        scan = Cost(pages * tiles * layout.page_nbytes(d), pages * rows * self._scan_operations(layout, d))
        if isinstance(retrieval, Exact):
            return _of_heads(scan, tokens * key_nbytes, 2.0 * tokens * rows * d, 0.0, heads)
        demand = Demand.of(retrieval, tokens, wanted)
        if demand.alpha is None and demand.wanted > WORTH * tokens:
            return Cost(0.0, 0.0, 0.0, 1.0)
        read = min(float(tokens), self._read(demand, rows))
        given_up = max(rising(read, WORTH * tokens, WORTH_POWER), demand.crowded)
        operations = read * rows * d * self.score
        if demand.alpha is None:
            operations *= RANKED_SCORE
        elif isinstance(retrieval, TopP):  # a guess: sums of masses go over the representatives again
            scan = Cost(2 * scan.nbytes, 2 * scan.operations)
        if demand.alpha is not None:
            given_up = max(given_up, demand.spread)
        ranking = rows * (pages * self.rank_page + demand.wanted * RANKED_OPERATIONS) if demand.alpha is None else 0.0
        kept = 1 - given_up
        read *= tiles
        return _of_heads(
            Cost(scan.nbytes, scan.operations + ranking, 0.0, given_up),
            kept * read * key_nbytes,
            kept * operations,
            kept * read * RUN_JUMPS / self.apart,
            heads,
        )

    def _scan_operations(self, layout: Layout, d: int) -> float:
        return d * self.scan * (2 if layout.box or layout.farthest else 1)

    def _read(self, demand: Demand, rows: int) -> float:
        """Tokens that are read for a tile's rows, which want the same ones in part."""
        together = sqrt(min(rows, TILE) / USUAL_ROWS)
        if demand.alpha is not None:
            return demand.wanted + self.tokens * math.exp(-self.growth * math.log(demand.alpha)) * together
        if self.ranked is None:
            return float(demand.tokens)
        return self.ranked * math.pow(demand.wanted, self.ranked_power) * together


def _of_heads(scan: Cost, nbytes: float, operations: float, jumps: float, heads: int) -> Cost:
    """The scan and what is read, of every KV head that is asked."""
    total = scan.nbytes + nbytes, scan.operations + operations
    return Cost(total[0] * heads, total[1] * heads, jumps * heads / _native.threads(), scan.given_up)
