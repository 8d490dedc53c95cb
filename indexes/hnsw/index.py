"""The graph index: hnswlib's links, our walk (`native/graph/`), for DIPR as in AlayaDB (arXiv 2504.10326, algorithm 1)."""

import math
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self, cast

import numpy as np
import numpy.typing as npt

import indexes._native as _native
import indexes.file as index_file
import indexes.hnsw.work as work
from indexes.accelerate import Accelerator
from indexes.base import BuildCost, Cost, Float32, Found, IndexCorrupt, Int32, Queries
from indexes.blocks import Blocks
from indexes.hnsw.build import accelerated_steps, link_steps
from indexes.hnsw.codes import CODE_STEP, Codes, in_lines
from indexes.hnsw.samples import check_samples, merged_lists, nearest_of_heads, starts
from indexes.hnsw.saved import restore
from indexes.hnsw.settings import Settings
from indexes.mass import reach_mass
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

Form = Literal["best_first", "listed"]
DEFAULT = Settings()


@dataclass
class Hnsw:
    """An index of kind "hnsw". Finds nearly all that a query wants, at a cost that hardly grows with the number of tokens.

    Codes and links are kept of each key; walks look at codes, what may be wanted is scored exactly. top_p is without guarantee:
    the mass of what a walk does not see is estimated from tokens drawn at random.
    """

    kind: ClassVar[str] = "hnsw"
    library: ClassVar[str] = "hnswlib"
    walks: ClassVar[bool] = True
    accelerated: ClassVar[bool] = True
    estimates_tail: ClassVar[bool] = False

    blocks: Blocks
    settings: Settings
    codes: Codes
    starts: Int32
    """`[kv_heads, count]`: tokens that sample queries want."""

    @classmethod
    def build(
        cls,
        blocks: Blocks,
        samples: Float32 | None = None,
        settings: Settings = DEFAULT,
        *,
        accelerator: Accelerator | None = None,
    ) -> Self:
        """samples: float32 `[q_heads, m, head_dim]`, queries of decode steps, from which links and starts are learnt.
        accelerator: what finds neighbours, None for hnswlib, which goes on where it is lost.

        Uses all of the pool's threads. Raises ModuleNotFoundError without hnswlib, ValueError for samples of another shape.
        """
        steps = cls.build_steps(blocks, samples, settings, accelerator=accelerator)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return cast(Self, done.value)

    @classmethod
    def build_steps(
        cls,
        blocks: Blocks,
        samples: Float32 | None = None,
        settings: Settings = DEFAULT,
        *,
        accelerator: Accelerator | None = None,
    ) -> Generator[float, None, Self]:
        """`build` in steps of less than a second, but the last; see `indexes.registry.Stepped`."""
        if samples is not None:
            check_samples(blocks, samples)
        made = cls(blocks, settings, Codes.of(blocks, settings.degree), np.empty((blocks.kv_heads, 0), np.int32))
        most, linked = 2 * settings.links, 0
        if accelerator is not None:
            graph, links = made.codes.native, made.codes.links
            linked = yield from accelerated_steps(accelerator, blocks, graph, links, most, settings.width)
        for head in range(linked, blocks.kv_heads):
            into = made.codes.links[head, :, :most]
            for share in link_steps(blocks.keys(head), into, settings.width, _native.threads()):
                yield (head + share) / blocks.kv_heads
        if samples is not None and blocks.tokens > 1:
            for _ in made._learn_steps(samples, accelerator):
                yield 1.0
        _native.graph_repair(made.codes.native, made.codes.no_parents())
        return made

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`. What benchmarks/README.md says at 128K tokens; an insertion walks about log(n) keys."""
        keys = tokens * kv_heads
        code = -(-head_dim // CODE_STEP) * CODE_STEP + 4
        probes = min(tokens, DEFAULT.random + DEFAULT.starts) * kv_heads
        seconds = 2.65e-6 * keys * math.log2(max(tokens, 2)) * head_dim / 128
        return BuildCost(seconds, keys * (4 * DEFAULT.degree + code) + probes * code, min(1.0, 7500 / max(tokens, 1)))

    def learn(self, samples: Float32) -> None:
        """Add what sample queries, float32 `[q_heads, m, head_dim]`, show. Raises ValueError for another shape."""
        for _ in self._learn_steps(samples):
            pass

    def _learn_steps(self, samples: Float32, accelerator: Accelerator | None = None) -> Iterator[None]:
        """`learn`, yielding after each KV head."""
        check_samples(self.blocks, samples)
        heads, d = self.blocks.kv_heads, self.blocks.head_dim
        groups = np.ascontiguousarray(samples, np.float32).reshape(heads, -1, d)
        learnt = []
        for head, nearest in enumerate(nearest_of_heads(self.blocks, groups, self.settings.neighbours, accelerator)):
            pivots, offsets, candidates = merged_lists(nearest)
            _native.graph_connect(self.codes.native, self.blocks.native, head, pivots, offsets, candidates)
            learnt.append(starts(nearest, max(self.settings.starts - 1, 0)))
            yield
        most = max(map(len, learnt))
        self.starts = np.stack([np.resize(tokens, most) for tokens in learnt])  # a start twice does no harm
        self.__dict__.pop("_probes", None)

    @property
    def nbytes(self) -> int:
        tokens, codes = self._probes
        return self.codes.nbytes + tokens.nbytes + codes.nbytes + self.starts.nbytes

    @cached_property
    def _probes(self) -> tuple[Int32, npt.NDArray[np.uint8]]:
        """Where walks begin: tokens `[kv_heads, count]`, the random ones first, the one that all are reached from last, and their
        codes, together."""
        n = self.codes.tokens
        count = min(self.settings.random, n)
        edges = np.arange(count + 1) * n // max(count, 1)
        drawn = np.random.default_rng(n).integers(edges[:-1], edges[1:]) if count else edges[:0]
        heads = self.blocks.kv_heads
        root = np.zeros((heads, min(n, 1)))
        tokens = np.hstack([np.broadcast_to(drawn, (heads, count)), self.starts, root]).astype(np.int32)
        return tokens, in_lines(np.stack([self.codes.codes[head, tokens[head]] for head in range(heads)]))

    @cached_property
    def _radius(self) -> Float32:
        return np.asarray(self.codes.residual[:, : self.codes.tokens].max(axis=1, initial=0.0), np.float32)

    def search(
        self,
        queries: Queries,
        retrieval: Retrieval,
        *,
        estimate_tail: bool = False,  # noqa: ARG002, of the protocol; a graph has no estimate of values
        tight: bool = False,
        give_up: bool = False,
        form: Form = "best_first",
        share: bool = True,
    ) -> Found:
        """As the protocol says; `tail` is None.

        tight: bound what was missed by the codes of all keys, read for it. give_up: by `settings.dense` and
        `settings.budget`; without it all codes are read for queries that want so much. form:
        "listed" for the order of AlayaDB's algorithm. share: whether the query heads of a group walk together.
        """
        if isinstance(retrieval, Exact):
            return self._everything(queries)
        if isinstance(retrieval, TopP):
            found = reach_mass(lambda asked, range_: self._walk(asked, range_, give_up=give_up), queries, retrieval.p)
        else:
            found = self._walk(queries, retrieval, give_up=give_up, listed=form == "listed", share=share)
        if not tight:
            return found
        bound = np.empty_like(found.missed_bound)
        native = (self.codes.native, self.blocks.native, queries.native)
        _native.graph_bound(*native, queries.scale, found.offsets, found.ids, bound)
        keys = self.codes.tokens * queries.heads
        return replace(
            found,
            missed_bound=np.minimum(found.missed_bound, bound),
            scanned=max(found.scanned, keys),
            nbytes=found.nbytes + keys * (self.codes.codes.shape[2] + 4),
        )

    def _walk(
        self, queries: Queries, retrieval: Dipr | TopK, *, give_up: bool, listed: bool = False, share: bool = True
    ) -> Found:
        settings, (probes, codes) = self.settings, self._probes
        offsets, ids, scores, missed, bound, dense, scanned, nbytes = _native.graph_search(
            self.codes.native,
            self.blocks.native,
            queries.native,
            probes,
            codes,
            min(settings.random, self.codes.tokens),
            self.codes.outliers,
            self._radius,
            beta=retrieval.beta(queries.scale) if isinstance(retrieval, Dipr) else 0.0,
            k=min(retrieval.k, max(self.codes.tokens, 1)) if isinstance(retrieval, TopK) else 0,
            scale=queries.scale,
            listed=listed,
            share=share,
            scan=False,
            give_up=give_up,
            patience=settings.patience,
            least=settings.least,
            slack=settings.slack,
            dense_share=settings.dense,
            budget=settings.budget,
        )
        shape = queries.q.shape[:2]
        flags = dense.view(np.bool_).reshape(shape) if give_up else None
        return Found(offsets, ids, scores, scanned, nbytes, missed.reshape(shape), bound.reshape(shape), None, flags)

    def _everything(self, queries: Queries) -> Found:
        heads, n = queries.q.shape[:2]
        shown = np.ones(self.codes.tokens, np.bool_)
        if queries.hidden is not None:
            bits = np.unpackbits(queries.hidden.view(np.uint8), bitorder="little", count=self.codes.tokens)
            shown = bits == 0
        seen = [np.flatnonzero(shown[begin:end]) + begin for begin, end in zip(queries.begin, queries.end, strict=True)]
        asked = np.ones(queries.kv_heads, np.bool_) if queries.asked is None else queries.asked
        rows = [row if asked[head * queries.kv_heads // heads] else row[:0] for head in range(heads) for row in seen]
        ids = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int32)
        offsets = np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int64)
        scores = np.empty(len(ids), np.float32)
        _native.score(self.blocks.native, queries.native, offsets, ids, scores)
        none = np.full((heads, n), -np.inf, np.float32)
        keys = len(np.unique(np.concatenate(seen))) * queries.heads if seen else 0
        return Found(offsets, ids, scores, keys, keys * self.blocks.token_nbytes // 2, none, none.copy())

    def add(self, blocks: Blocks) -> None:
        """As the protocol says, by HNSW's insertion; the first time, all links are walked once.

        Raises ValueError for blocks of another shape, or of fewer tokens.
        """
        blocks.check_extends(self.blocks)
        begin = self.codes.tokens
        self.blocks = blocks
        if self.codes.parents is None:
            self.codes.parents = self.codes.no_parents()
            _native.graph_repair(self.codes.native, self.codes.parents)
        self.codes.grow(blocks)
        _native.graph_insert(self.codes.native, blocks.native, begin, self.settings.width, self.codes.parents)
        for name in ("_probes", "_radius"):
            self.__dict__.pop(name, None)

    def save(self, path: Path) -> None:
        """As the protocol says. Raises OSError."""
        header, arrays = self.codes.saved()
        header |= {"settings": asdict(self.settings), "blocks": self.blocks.identity()}
        index_file.write(path, self.kind, header, arrays | {"starts": self.starts})

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """As the protocol says. Raises IndexCorrupt, or OSError."""
        settings, codes, learnt = restore(*index_file.read(path, cls.kind), blocks, path)
        return cls(blocks, settings, codes, learnt)

    def verify(self) -> None:
        """As the protocol says: links, codes, and that links lead from token 0, where all walks begin too, to every token."""
        self.codes.verify(self.blocks)
        for head in range(self.blocks.kv_heads):
            lost = self.codes.tokens - _native.graph_reachable(self.codes.native, head)
            if lost:
                raise IndexCorrupt(f"{lost} tokens of KV head {head} cannot be reached by links; build the index again")

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, wanted: float | None = None, heads: int | None = None
    ) -> Cost:
        """As the protocol says; `indexes.hnsw.work` has the formula."""
        asked = self.blocks.kv_heads if heads is None else heads
        return work.cost(self.blocks, self.settings, (tokens, rows, asked), retrieval, wanted)
