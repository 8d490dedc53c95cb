"""An index that looks at every key, in numpy: what the others are compared with."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from indexes.base import Cost, Found, IndexCorrupt, Queries
from indexes.blocks import Blocks
from indexes.oracle import wanted_set
from indexes.retrieval import Retrieval


@dataclass
class Brute:
    """keep: which share of the wanted tokens of each row it finds, the largest first, to make a bad index of it."""

    blocks: Blocks
    keep: float = 1.0
    kind: ClassVar[str] = "brute"

    @property
    def nbytes(self) -> int:
        return 0

    @classmethod
    def build(cls, blocks: Blocks) -> Self:
        return cls(blocks)

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,
        tight: bool = False,
        give_up: bool = False,
    ) -> Found:
        heads, n, head_dim = queries.q.shape
        group = heads // self.blocks.kv_heads
        ids, scores, missed, tails = [], [], [], []
        for head in range(heads):
            keys, values = self.blocks.keys(head // group), self.blocks.values(head // group)
            for i in range(n):
                logits = visible(queries, i, keys @ queries.q[head, i])
                floor, outside = float(queries.floor[head, i]), float(queries.outside[head, i])
                chosen = np.flatnonzero(wanted_set(logits, retrieval, queries.scale, floor, outside))
                chosen = np.sort(chosen[np.argsort(-logits[chosen])][: int(np.ceil(self.keep * len(chosen)))])
                ids.append(chosen)
                scores.append(logits[chosen])
                rest = logits.copy()
                rest[chosen] = -np.inf
                lse, tail = attention(queries.scale * rest.astype(np.float64), values)
                missed.append(lse)
                tails.append(tail)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
        log = np.array(missed, np.float32).reshape(heads, n)
        return Found(
            offsets=offsets,
            ids=np.concatenate(ids).astype(np.int32),
            scores=np.concatenate(scores).astype(np.float32),
            scanned=self.blocks.tokens * self.blocks.kv_heads,
            nbytes=self.blocks.tokens * self.blocks.kv_heads * self.blocks.token_nbytes // 2,
            missed=log,
            missed_bound=np.nextafter(log, np.float32(np.inf)),
            tail=np.array(tails, np.float32).reshape(heads, n, head_dim) if estimate_tail else None,
        )

    def add(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def save(self, path: Path) -> None:
        path.write_bytes(b"brute")

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        if path.read_bytes() != b"brute":
            raise IndexCorrupt(f"{path} is no brute index")
        return cls(blocks)

    def verify(self) -> None:
        """There is nothing that could be wrong."""

    def cost(self, tokens: int, rows: int, retrieval: Retrieval) -> Cost:
        products = tokens * self.blocks.kv_heads * self.blocks.head_dim
        return Cost(float(self.blocks.token_nbytes // 2 * tokens * self.blocks.kv_heads), float(products * rows))


def visible(queries: Queries, i: int, logits):
    """The products `[tokens]` of query i, -inf where it sees nothing."""
    t = np.arange(len(logits))
    seen = (t >= queries.begin[i]) & (t < queries.end[i])
    if queries.hidden is not None:
        seen &= ~np.unpackbits(queries.hidden.view(np.uint8), bitorder="little")[: len(t)].astype(bool)
    return np.where(seen, logits, -np.inf).astype(np.float32)


def attention(logits, values):
    """The log of the sum of exp(logits), and the output; -inf and zero where there is nothing."""
    top = logits.max(initial=-np.inf)
    if top == -np.inf:
        return -np.inf, np.zeros(values.shape[1])
    weights = np.exp(logits - top)
    return top + np.log(weights.sum()), weights @ values / weights.sum()
