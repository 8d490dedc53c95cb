"""An index in numpy that looks at every key. It stands in for the real kinds where a test is not about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from indexes.base import Ask, Cost, IndexCorrupt, Queries, SearchResult, unlimited
from indexes.blocks import Blocks
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP


@dataclass
class Scan:
    """Finds exactly what a retrieval names.

    keep: the share of it that is found, the largest first; a bad index finds less than all. broken: the error that `verify`
    raises, "" for none. loose: how far `missed_bound` lies above the truth, as a logarithm, where no tight bound is wanted.
    """

    blocks: Blocks
    query_samples: np.ndarray | None = None
    broken: str = ""
    keep: float = 1.0
    loose: float = 3.0
    kind: ClassVar[str] = "flat"
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        return self.blocks.tokens

    @classmethod
    def build(cls, blocks: Blocks, query_samples: np.ndarray | None = None) -> Self:
        return cls(blocks, query_samples)

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,
        tight: bool = False,
        give_up: bool = False,
    ) -> SearchResult:
        heads, n, head_dim = queries.q.shape
        ids, scores, missed, tails = [], [], [], []
        for head in range(heads):
            kv_head = head // (heads // self.blocks.kv_heads)
            keys, values = self.blocks.keys(kv_head).astype(np.float64), self.blocks.values(kv_head).astype(np.float64)
            for i in range(n):
                at = np.arange(queries.begin[i], queries.end[i])
                at = at if queries.hidden is None else at[~_bits(queries.hidden, self.blocks.tokens)[at]]
                products = keys[at] @ queries.q[head, i].astype(np.float64)
                chosen = expected_tokens(products, retrieval, queries.scale, queries.floor[head, i], queries.outside[head, i])
                chosen = np.sort(chosen[np.argsort(-products[chosen])][: int(np.ceil(self.keep * len(chosen)))])
                ids.append(at[chosen])
                scores.append(products[chosen])
                log, tail = attention(queries.scale * np.delete(products, chosen), np.delete(values[at], chosen, axis=0))
                missed.append(log)
                tails.append(tail)
        log = np.array(missed, np.float32).reshape(heads, n)
        return SearchResult(
            offsets=np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
            ids=np.concatenate(ids).astype(np.int32),
            scores=np.concatenate(scores).astype(np.float32),
            scanned=int((queries.end - queries.begin).max()) * self.blocks.kv_heads,
            nbytes=self.blocks.tokens,
            missed=log,
            missed_bound=np.nextafter(log + np.float32(0 if tight else self.loose), np.float32(np.inf)),
            tail=np.array(tails, np.float32).reshape(heads, n, head_dim) if estimate_tail else None,
        )

    def insert(self, blocks: Blocks) -> None:
        assert blocks.tokens > self.blocks.tokens
        self.blocks = blocks

    def save(self, path: Path, ask: Ask = unlimited) -> None:
        ask(4)
        path.write_bytes(b"scan")

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        if path.read_bytes() != b"scan":
            raise IndexCorrupt(f"{path} holds another index")
        return cls(blocks)

    def verify(self) -> None:
        if self.broken:
            raise IndexCorrupt(self.broken)

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        return Cost(float(tokens), float(tokens * rows))


def _bits(words: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=count).astype(bool)


def expected_tokens(products: np.ndarray, retrieval: Retrieval, scale: float, floor: float, outside: float) -> np.ndarray:
    """The positions of the products that a retrieval names. floor: the largest product elsewhere; outside: the log of the softmax
    sum elsewhere."""
    order = np.argsort(-products, kind="stable")
    match retrieval:
        case Exact():
            return order
        case Dipr():
            return np.flatnonzero(products >= max(products.max(initial=-np.inf), floor) - retrieval.beta(scale))
        case TopK(k):
            return order[:k]
        case TopP(p):
            top = max(scale * products.max(initial=-np.inf), float(outside), -1e300)
            weights, others = np.exp(scale * products[order] - top), np.exp(float(outside) - top)
            before = others + np.cumsum(weights) - weights
            return order if p == 1 else order[before < p * (others + weights.sum())]


def attention(logits: np.ndarray, values: np.ndarray) -> tuple[float, np.ndarray]:
    """The logarithm of the sum of exp(logits), and the output `[d]`; -inf and zeros where there are no logits."""
    if not len(logits):
        return -np.inf, np.zeros(values.shape[1])
    weights = np.exp(logits - logits.max())
    return float(logits.max() + np.log(weights.sum())), weights @ values / weights.sum()
