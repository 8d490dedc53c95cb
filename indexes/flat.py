"""A scan of short codes: exact by its bounds.

Of every key are kept its length and 8 bits a dimension, relative to the mean of its chunk and rotated. By Cauchy-Schwarz the
length bounds q.k, and what the code leaves of the key bounds the error of an estimated q.k. A search drops what cannot pass
by its length, then by its signs, or by four bits and then eight, and scores the rest exactly, so that DIPR and top-k come out
as if every key had been read. The codes are scalar quantisation with a bound for each key; RaBitQ (arXiv 2405.12497) is the
model for the centre, the rotation and the per-key factors.

All bounds are deterministic: none of them holds with high probability only.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

import indexes._native as _native
import indexes.flat_cost as _cost
from indexes import file
from indexes.base import BuildCost, Cost, Float32, Found, IndexCorrupt, Queries
from indexes.blocks import Blocks
from indexes.mass import heads_of, joined
from indexes.retrieval import Dipr, Retrieval, TopK, TopP

CHUNK = _native.FLAT_CHUNK
LENGTHS = _cost.LENGTHS


class Flat:
    """Of one layer of one segment. Kept beside the keys: about head_dim + 9 bytes a token and KV head."""

    kind: ClassVar[str] = "flat"
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = False

    def __init__(self, blocks: Blocks, codes: "_Codes") -> None:
        self.blocks = blocks
        self._codes = codes

    @classmethod
    def build(cls, blocks: Blocks, samples: Float32 | None = None) -> Self:  # noqa: ARG003, codes need none
        """Code all keys of `blocks`."""
        index = cls(replace(blocks, tokens=0), _Codes.empty(blocks.kv_heads, blocks.head_dim, 0))
        index.add(blocks)
        return index

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md."""
        keys = tokens * kv_heads
        return BuildCost(6.4e-9 * keys * head_dim, keys * (1.13 * head_dim + 12), 0.08)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,  # noqa: ARG002, of the protocol; codes have no estimate of values
        tight: bool = False,
        give_up: bool = False,
    ) -> Found:
        """See `indexes.base.Index`; the result is exact. `missed_bound` is cheap and loose unless `tight`; then one pass over
        all codes bounds each token not found by itself. Tails are not estimated: `tail` is None.

        TopP: tokens outside count as seen, so that what is left out has at most the share 1 - p of all.

        give_up: some chunks of each KV head tell what the codes of all of them would leave. Where reading codes and keys for it
        is expected to cost nearly what all keys and values cost, the queries of the KV head are left, but for those that
        lengths alone answer and those that see less than 8,192 tokens. The same queries are left whatever the threads do.
        """
        if isinstance(retrieval, TopP):
            return _top_p(self, queries, retrieval.p, give_up)
        beta, k = math.inf, 0
        if isinstance(retrieval, Dipr):
            beta = retrieval.beta(queries.scale)
        elif isinstance(retrieval, TopK):
            k = retrieval.k
        return self.within(queries, beta, k, tight=tight, give_up=give_up)

    def within(self, queries: Queries, beta: float, k: int = 0, *, tight: bool = False, give_up: bool = False) -> Found:
        """The visible tokens within `beta`, in units of q.k, of the largest q.k and queries.floor, or the k largest."""
        wanted = beta, min(k, 2**31), queries.scale, give_up
        native = self._codes.native.search(self.blocks.native, queries.native, *wanted)
        offsets, ids, scores, caps, missed, bound, passed, dense = native
        shape = queries.q.shape[:2]
        passed = passed.tolist()
        nbytes = passed[3]
        if tight and np.count_nonzero(dense) < queries.heads * (queries.rows // queries.kv_heads):
            self._codes.native.missed(self.blocks.native, queries.native, offsets, ids, caps, queries.scale, missed, bound)
            nbytes += self._codes.used(self.blocks.tokens) * queries.heads // queries.kv_heads
        scanned = passed[4] * queries.heads
        flags = dense.view(np.bool_).reshape(shape) if give_up else None
        return Found(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), None, flags)

    def add(self, blocks: Blocks) -> None:
        """See `indexes.base.Index`. Raises ValueError for blocks of another layout, or fewer tokens."""
        blocks.check_extends(self.blocks)
        self._codes = self._codes.grown(blocks.tokens)
        self._codes.native.encode(blocks.native, self.blocks.tokens)
        self.blocks = blocks

    def save(self, path: Path) -> None:
        """See `indexes.base.Index`. Raises OSError."""
        file.write(path, self.kind, {"blocks": self.blocks.identity()}, self._codes.arrays(_chunks(self.blocks.tokens)))

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `indexes.base.Index`. Raises IndexCorrupt, OSError."""
        header, arrays = file.read(path, cls.kind)
        file.check_blocks(path, header, blocks)
        expected = _Codes.empty(blocks.kv_heads, blocks.head_dim, _chunks(blocks.tokens)).arrays(None)
        for name, array in expected.items():
            if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype):
                raise IndexCorrupt(f"{path} holds no {name} of shape {array.shape}; build the index again")
        return cls(blocks, _Codes(**{name: arrays[name] for name in expected}))

    def verify(self) -> None:
        """Code every key again in mind: raises IndexCorrupt unless each bound holds."""
        wrong = self._codes.native.violations(self.blocks.native)
        if wrong:
            raise IndexCorrupt(f"{wrong} keys lie beyond what their codes claim; build the index again")

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, wanted: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `_cost` for the formula."""
        asked = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, tokens, rows, asked, retrieval, wanted)


@dataclass
class _Codes:
    """The arrays of the native index, with room for more chunks than there are."""

    centres: Float32
    lengths: npt.NDArray[np.uint16]
    high: npt.NDArray[np.uint8]
    low: npt.NDArray[np.uint8]
    signs: npt.NDArray[np.uint8]
    longest: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        self.native = _native.Flat(self.centres, self.lengths, self.high, self.low, self.signs, self.longest)

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, chunks: int) -> "_Codes":
        plane = CHUNK * head_dim // 2
        return cls(
            np.zeros((chunks, kv_heads, head_dim + 1), np.float32),
            np.zeros((chunks, kv_heads, LENGTHS, CHUNK), np.uint16),
            np.zeros((chunks, kv_heads, plane), np.uint8),
            np.zeros((chunks, kv_heads, plane), np.uint8),
            np.zeros((chunks, kv_heads, CHUNK * (head_dim // 8 + 4)), np.uint8),
            np.zeros((chunks, kv_heads), np.int32),
        )

    def arrays(self, chunks: int | None) -> dict[str, npt.NDArray[Any]]:
        """The first `chunks` chunks of each array."""
        names = ("centres", "lengths", "high", "low", "signs", "longest")
        return {name: getattr(self, name)[:chunks] for name in names}

    def grown(self, tokens: int) -> "_Codes":
        """With room for `tokens` tokens; where that is more than before, for half as many again, so that adding stays cheap."""
        have, want = len(self.centres), _chunks(tokens)
        if want <= have:
            return self
        _, kv_heads, width = self.centres.shape
        bigger = _Codes.empty(kv_heads, width - 1, max(want, have + have // 2))
        for name, array in self.arrays(None).items():
            getattr(bigger, name)[:have] = array
        return bigger

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays(None).values())

    def used(self, tokens: int) -> int:
        return sum(array.nbytes for array in self.arrays(_chunks(tokens)).values())


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


def _top_p(index: Flat, queries: Queries, p: float, give_up: bool) -> Found:
    """Widens the range until the mass found, and bounds on what was missed, agree on how many tokens are needed."""
    alpha = 1e-2
    found, unsure = None, np.empty(0, np.bool_)
    while True:
        whole = p == 1 or alpha < 1e-12
        beta = math.inf if whole else -math.log(alpha) / queries.scale
        asked = queries if found is None else replace(queries, asked=unsure)
        again = index.within(asked, beta, tight=not whole, give_up=give_up)
        found = again if found is None else joined(queries, found, again, unsure)
        counts = _tokens_for_share(queries, found, p)
        unsure = heads_of(queries, np.array([count is None for count in counts]))
        if not unsure.any():
            return _cut(queries, found, [count or 0 for count in counts])
        alpha *= 1e-2


def _tokens_for_share(queries: Queries, found: Found, p: float) -> list[int | None]:
    """How many of each row's best tokens leave at most 1 - p of all mass, None where that cannot be told yet."""
    counts: list[int | None] = []
    outside, bounds = queries.outside.reshape(-1).astype(float), found.missed_bound.reshape(-1).astype(float)
    for row in range(queries.rows):
        if found.dense is not None and found.dense.reshape(-1)[row]:
            counts.append(0)
            continue
        scores = queries.scale * found.scores[found.offsets[row] : found.offsets[row + 1]].astype(float)
        top = max(scores.max(initial=-math.inf), outside[row], bounds[row])
        if top == -math.inf:
            counts.append(0)
            continue
        seen = math.exp(outside[row] - top) + np.concatenate([[0.0], np.cumsum(np.exp(-np.sort(-scores) - top))])
        least, most = seen[-1], seen[-1] + math.exp(bounds[row] - top)
        # A share that rounding could miss counts as reached only by all.
        needed = [len(scores) if p == 1 else int(np.searchsorted(seen, p * total)) for total in (least, most)]
        counts.append(needed[1] if needed[0] == needed[1] <= len(scores) else None)
    return counts


def _cut(queries: Queries, found: Found, counts: list[int]) -> Found:
    """Each row's best tokens alone; what is cut off counts as missed."""
    keep = np.zeros(len(found.ids), bool)
    missed, bound = found.missed.reshape(-1).copy(), found.missed_bound.reshape(-1).copy()
    for row, count in enumerate(counts):
        part = slice(int(found.offsets[row]), int(found.offsets[row + 1]))
        order = np.argsort(-found.scores[part], kind="stable")
        keep[part.start + order[:count]] = True
        lost = queries.scale * found.scores[part][order[count:]].astype(float)
        if len(lost):
            left = lost.max() + math.log(np.exp(lost - lost.max()).sum())
            missed[row] = np.logaddexp(missed[row], left)
            bound[row] = np.nextafter(np.float32(np.logaddexp(bound[row], left)), np.float32(np.inf))
    shape = queries.q.shape[:2]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return replace(
        found,
        offsets=offsets,
        ids=found.ids[keep],
        scores=found.scores[keep],
        missed=missed.reshape(shape),
        missed_bound=bound.reshape(shape),
    )
