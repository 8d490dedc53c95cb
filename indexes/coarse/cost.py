"""The expected cost of a search over pages: the scan of the representatives, the pages that are read, the rows that give up.

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
from indexes.coarse.layout import PageLayout
from indexes.retrieval import Exact, Retrieval, TopP
from indexes.selectivity import Selectivity, rising

TILE = 16
"""Rows that share a read."""
USUAL_ROWS = 4
"""The number of rows of a KV head for which a kind's constants say how many tokens are read."""
WORTH, WORTH_POWER = 0.25, 4.0
"""A KV head is given up where the pages to be read hold a larger share of the tokens than WORTH (`native/coarse/`). The power
says how sharply."""
RANKED_OPERATIONS = 23_000.0
"""Operations of each row for each of its k tokens, to find the pages that may hold them."""
RUN_JUMPS = 1.4
"""Jumps for each run of adjacent keys."""
RANKED_SCORE = 1.2
"""Cost of a key that is read for the k largest, relative to one that is read for a range; the k best are kept in order."""


@dataclass(frozen=True)
class PageCost:
    """The constants of a kind.

    scan: operations for each channel of a representative and row. tokens: a sharp KV head reads tokens * alpha ** -growth tokens
    for a range, however long the context is. apart: the number of adjacent keys in a run. score: operations for each row and
    channel of a key that is read. rank_page: operations for each page and row where the k largest are asked for. ranked: the k
    largest read ranked * k ** ranked_power tokens; None where they read nearly all.
    """

    scan: float
    tokens: float
    growth: float
    apart: int
    score: float
    rank_page: float
    ranked: float | None
    ranked_power: float = 0.67

    def of(
        self, layout: PageLayout, blocks: Blocks, shape: tuple[int, int, int], retrieval: Retrieval, expected_tokens: float | None
    ) -> Cost:
        """The cost of one search. shape: visible tokens, rows of each KV head, KV heads. expected_tokens: as `Index.cost` takes
        it."""
        tokens, rows, heads = shape
        d, key_nbytes = blocks.head_dim, blocks.key_nbytes
        tiles, pages = ceil(rows / TILE), ceil(tokens / layout.page_size)
        scan = Cost(pages * tiles * layout.page_nbytes(d), pages * rows * self._scan_operations(layout, d))
        if isinstance(retrieval, Exact):
            return _of_heads(scan, tokens * key_nbytes, 2.0 * tokens * rows * d, 0.0, heads)
        selectivity = Selectivity.of(retrieval, tokens, expected_tokens)
        if selectivity.alpha is None and selectivity.expected_tokens > WORTH * tokens:
            return Cost(0.0, 0.0, 0.0, 1.0)
        read = min(float(tokens), self._read(selectivity, rows))
        given_up = max(rising(read, WORTH * tokens, WORTH_POWER), selectivity.crowded)
        operations = read * rows * d * self.score
        if selectivity.alpha is None:
            operations *= RANKED_SCORE
        elif isinstance(retrieval, TopP):  # a guess: the representatives are scanned once more, to bound masses
            scan = Cost(2 * scan.nbytes, 2 * scan.operations)
        if selectivity.alpha is not None:
            given_up = max(given_up, selectivity.spread)
        ranking = (
            rows * (pages * self.rank_page + selectivity.expected_tokens * RANKED_OPERATIONS)
            if selectivity.alpha is None
            else 0.0
        )
        kept = 1 - given_up
        read *= tiles
        return _of_heads(
            Cost(scan.nbytes, scan.operations + ranking, 0.0, given_up),
            kept * read * key_nbytes,
            kept * operations,
            kept * read * RUN_JUMPS / self.apart,
            heads,
        )

    def _scan_operations(self, layout: PageLayout, d: int) -> float:
        return d * self.scan * (2 if layout.box or layout.farthest else 1)

    def _read(self, selectivity: Selectivity, rows: int) -> float:
        """The number of tokens that are read for a tile, whose rows want some tokens in common."""
        together = sqrt(min(rows, TILE) / USUAL_ROWS)
        if selectivity.alpha is not None:
            return selectivity.expected_tokens + self.tokens * math.exp(-self.growth * math.log(selectivity.alpha)) * together
        if self.ranked is None:
            return float(selectivity.tokens)
        return self.ranked * math.pow(selectivity.expected_tokens, self.ranked_power) * together


def _of_heads(scan: Cost, nbytes: float, operations: float, jumps: float, heads: int) -> Cost:
    """The cost of several KV heads, from the cost of one head's scan and reads."""
    total = scan.nbytes + nbytes, scan.operations + operations
    return Cost(total[0] * heads, total[1] * heads, jumps * heads / _native.threads(), scan.given_up)
