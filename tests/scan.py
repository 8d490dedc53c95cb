"""An index that looks at every key, in numpy: it stands for the kinds where a test is not about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from indexes.base import Cost, Found, IndexCorrupt, Queries
from indexes.blocks import Blocks
from indexes.retrieval import Dipr, Retrieval, TopK, TopP

LOOSE = 3.0
"""By how much `missed_bound` is too large, as a logarithm, unless a tight one is asked for."""


@dataclass
class Scan:
    """Finds what is asked for, exactly. broken: what `verify` says."""

    blocks: Blocks
    samples: np.ndarray | None = None
    broken: str = ""
    kind: ClassVar[str] = "flat"

    @property
    def nbytes(self) -> int:
        return self.blocks.tokens

    @classmethod
    def build(cls, blocks: Blocks, samples: np.ndarray | None = None) -> Self:
        return cls(blocks, samples)

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
        ids, scores, missed, tails = [], [], [], []
        for head in range(heads):
            kv_head = head // (heads // self.blocks.kv_heads)
            keys, values = self.blocks.keys(kv_head).astype(np.float64), self.blocks.values(kv_head).astype(np.float64)
            for i in range(n):
                at = np.arange(queries.begin[i], queries.end[i])
                products = keys[at] @ queries.q[head, i].astype(np.float64)
                chosen = wanted(products, retrieval, queries.scale, queries.floor[head, i], queries.outside[head, i])
                ids.append(at[chosen])
                scores.append(products[chosen])
                log, tail = attention(queries.scale * products[~chosen], values[at[~chosen]])
                missed.append(log)
                tails.append(tail)
        log = np.array(missed, np.float32).reshape(heads, n)
        return Found(
            offsets=np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
            ids=np.concatenate(ids).astype(np.int32),
            scores=np.concatenate(scores).astype(np.float32),
            scanned=int((queries.end - queries.begin).max()) * self.blocks.kv_heads,
            nbytes=self.blocks.tokens,
            missed=log,
            missed_bound=np.nextafter(log + np.float32(0 if tight else LOOSE), np.float32(np.inf)),
            tail=np.array(tails, np.float32).reshape(heads, n, head_dim) if estimate_tail else None,
        )

    def add(self, blocks: Blocks) -> None:
        assert blocks.tokens > self.blocks.tokens
        self.blocks = blocks

    def save(self, path: Path) -> None:
        path.write_bytes(b"scan")

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        if path.read_bytes() != b"scan":
            raise IndexCorrupt(f"{path} holds another index")
        return cls(blocks)

    def verify(self) -> None:
        if self.broken:
            raise IndexCorrupt(self.broken)

    def cost(self, tokens: int, rows: int, retrieval: Retrieval) -> Cost:
        return Cost(float(tokens), float(tokens * rows))


def wanted(products: np.ndarray, retrieval: Retrieval, scale: float, floor: float, outside: float) -> np.ndarray:
    """Which of the products are asked for."""
    match retrieval:
        case Dipr():
            return products >= max(products.max(initial=-np.inf), floor) - retrieval.beta(scale)
        case TopK(k):
            chosen = np.zeros(len(products), bool)
            chosen[np.argsort(-products)[:k]] = True
            return chosen
        case TopP(p):
            order = np.argsort(-products)
            top = max(scale * products.max(initial=-np.inf), outside)
            weights, others = np.exp(scale * products[order] - top), np.exp(outside - top)
            before = others + np.cumsum(weights) - weights
            chosen = np.zeros(len(products), bool)
            chosen[order[before < p * (others + weights.sum())]] = True
            return chosen
    raise AssertionError(retrieval)


def attention(logits: np.ndarray, values: np.ndarray) -> tuple[float, np.ndarray]:
    """The logarithm of the sum of exp(logits), and the output; -inf and zeros over nothing."""
    if not len(logits):
        return -np.inf, np.zeros(values.shape[1])
    weights = np.exp(logits - logits.max())
    return float(logits.max() + np.log(weights.sum())), weights @ values / weights.sum()
