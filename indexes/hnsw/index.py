"""The graph index: hnswlib's links, our walk (`native/graph/`), for DIPR as in AlayaDB (arXiv 2504.10326, algorithm 1)."""

import math
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import numpy.typing as npt

import indexes._native as _native
import indexes.file as index_file
import indexes.hnsw.cost as _cost
from indexes.accelerate import Accelerator
from indexes.base import Ask, BuildCost, Cost, Float32, IndexCorrupt, Int32, Queries, SearchResult, unlimited
from indexes.blocks import Blocks
from indexes.hnsw.build import accelerated_steps, link_steps
from indexes.hnsw.codes import CODE_STEP, Codes, in_lines
from indexes.hnsw.query_samples import check_query_samples, merged_lists, nearest_of_heads, starts
from indexes.hnsw.saved import restore
from indexes.hnsw.settings import Settings
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from indexes.searcher import Searcher
from indexes.top_p import top_p_by_ranges

Form = Literal["best_first", "listed"]
DEFAULT = Settings()


@dataclass
class Hnsw:
    """An index of kind "hnsw". It finds nearly all tokens that a query asks for, at a cost that hardly grows with the number of
    tokens.

    It keeps a code and links of each key; walks look at codes, and tokens that may be in range are scored exactly. TopP has no
    guarantee: the mass that a walk does not see is estimated from tokens drawn at random.
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
    """Tokens near to sample queries, where walks begin, `[kv_heads, count]`."""

    @classmethod
    def build(
        cls,
        blocks: Blocks,
        query_samples: Float32 | None = None,
        settings: Settings = DEFAULT,
        *,
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Link all keys of `blocks`, on all threads of the pool.

        query_samples: float32 `[q_heads, m, head_dim]`, queries of decode steps, from which links and starts are learnt.
        accelerator: the device that finds neighbours, None for hnswlib, which goes on where the device is lost. Raises
        ModuleNotFoundError without hnswlib, ValueError for samples of another shape.
        """
        steps = cls.build_steps(blocks, query_samples, settings, accelerator=accelerator)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return cast(Self, done.value)

    @classmethod
    def build_steps(
        cls,
        blocks: Blocks,
        query_samples: Float32 | None = None,
        settings: Settings = DEFAULT,
        *,
        accelerator: Accelerator | None = None,
    ) -> Generator[float, None, Self]:
        """`build` in steps that take less than a second, except the last; see `indexes.registry.IndexKind`."""
        if query_samples is not None:
            check_query_samples(blocks, query_samples)
        made = cls(blocks, settings, Codes.of(blocks, settings.degree), np.empty((blocks.kv_heads, 0), np.int32))
        most, linked = 2 * settings.links, 0
        if accelerator is not None:
            graph, links = made.codes.native, made.codes.links
            linked = yield from accelerated_steps(accelerator, blocks, graph, links, most, settings.width)
        for head in range(linked, blocks.kv_heads):
            into = made.codes.links[head, :, :most]
            for share in link_steps(blocks.keys(head), into, settings.width, _native.threads()):
                yield (head + share) / blocks.kv_heads
        if query_samples is not None and blocks.tokens > 1:
            for _ in made._learn_steps(query_samples, accelerator):
                yield 1.0
        _native.graph_repair(made.codes.native, made.codes.no_parents())
        return made

    @classmethod
    def build_cost(cls, tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
        """See `indexes.registry.Priced`; the figures are those of benchmarks/README.md at 128K tokens. An insertion walks about
        log(n) keys."""
        keys = tokens * kv_heads
        code = -(-head_dim // CODE_STEP) * CODE_STEP + 4
        probes = min(tokens, DEFAULT.random + DEFAULT.starts) * kv_heads
        seconds = 2.65e-6 * keys * math.log2(max(tokens, 2)) * head_dim / 128
        return BuildCost(seconds, keys * (4 * DEFAULT.degree + code) + probes * code, min(1.0, 7500 / max(tokens, 1)))

    def insert(self, blocks: Blocks) -> None:
        """See `indexes.base.Index`; new tokens go in by HNSW's insertion. The first call also follows all links once.

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
        for name in ("_probes", "_outliers", "_radius"):
            self.__dict__.pop(name, None)

    def learn(self, query_samples: Float32) -> None:
        """Add links and starts for sample queries, float32 `[q_heads, m, head_dim]`. Raises ValueError for another shape."""
        for _ in self._learn_steps(query_samples):
            pass

    def _learn_steps(self, query_samples: Float32, accelerator: Accelerator | None = None) -> Iterator[None]:
        """`learn`, yielding after each KV head."""
        check_query_samples(self.blocks, query_samples)
        heads, d = self.blocks.kv_heads, self.blocks.head_dim
        groups = np.ascontiguousarray(query_samples, np.float32).reshape(heads, -1, d)
        learnt = []
        for head, nearest in enumerate(nearest_of_heads(self.blocks, groups, self.settings.neighbours, accelerator)):
            pivots, offsets, candidates = merged_lists(nearest)
            _native.graph_connect(self.codes.native, self.blocks.native, head, pivots, offsets, candidates)
            learnt.append(starts(nearest, max(self.settings.starts - 1, 0)))
            yield
        most = max(map(len, learnt))
        self.starts = np.stack([np.resize(tokens, most) for tokens in learnt])  # the same start twice does no harm
        self.__dict__.pop("_probes", None)

    @property
    def nbytes(self) -> int:
        tokens, codes = self._probes
        return self.codes.nbytes + tokens.nbytes + codes.nbytes + self.starts.nbytes

    @cached_property
    def _probes(self) -> tuple[Int32, npt.NDArray[np.uint8]]:
        """The tokens where walks begin, `[kv_heads, count]`, and their codes. The random ones come first; the last is token 0,
        from which all tokens can be reached."""
        n = self.codes.tokens
        count = min(self.settings.random, n)
        edges = np.arange(count + 1) * n // max(count, 1)
        drawn = np.random.default_rng(n).integers(edges[:-1], edges[1:]) if count else edges[:0]
        heads = self.blocks.kv_heads
        root = np.zeros((heads, min(n, 1)))
        tokens = np.hstack([np.broadcast_to(drawn, (heads, count)), self.starts, root]).astype(np.int32)
        return tokens, in_lines(np.stack([self.codes.codes[head, tokens[head]] for head in range(heads)]))

    @cached_property
    def _outliers(self) -> tuple[Int32, npt.NDArray[np.uint8], Float32]:
        return self.codes.coded_outliers()

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
    ) -> SearchResult:
        """See `indexes.base.Index`; `tail` is None.

        tight: read the codes of all keys to bound what was missed. give_up: whether `settings.dense` and `settings.budget` may
        give up queries; otherwise all codes are read for such queries. form: "listed" for the order of AlayaDB's algorithm.
        share: whether the query heads of a group walk together.
        """
        if isinstance(retrieval, Exact):
            return self._everything(queries)
        if isinstance(retrieval, TopP):
            result = top_p_by_ranges(lambda some, range_: self._walk(some, range_, give_up=give_up), queries, retrieval.p)
        else:
            result = self._walk(queries, retrieval, give_up=give_up, listed=form == "listed", share=share)
        if not tight:
            return result
        bound = np.empty_like(result.missed_bound)
        native = (self.codes.native, self.blocks.native, queries.native)
        _native.graph_bound(*native, queries.scale, result.offsets, result.ids, bound)
        bound = np.minimum(result.missed_bound, bound)
        keys = self.codes.tokens * queries.heads
        return replace(
            result,
            missed=np.minimum(result.missed, bound),
            missed_bound=bound,
            scanned=max(result.scanned, keys),
            nbytes=result.nbytes + keys * (self.codes.codes.shape[2] + 4),
        )

    def searcher(
        self,
        retrieval: Retrieval,
        scale: float,
        *,
        estimate_tail: bool,  # noqa: ARG002, as in `search`
    ) -> Searcher | None:
        """See `indexes.searcher.searcher_of`; None for what takes several walks, or none."""
        if isinstance(retrieval, Exact | TopP):
            return None
        limits = self._limits(retrieval, scale)
        return Searcher(_native.graph_searcher(self.codes.native, self.blocks.native, *self._begins(), **limits))

    def _begins(self) -> tuple[Any, ...]:
        """Where walks begin, as kernels take it."""
        return *self._probes, min(self.settings.random, self.codes.tokens), *self._outliers, self._radius

    def _limits(self, retrieval: Dipr | TopK, scale: float) -> dict[str, Any]:
        """How far walks go, as kernels take it."""
        settings = self.settings
        return {
            "beta": retrieval.beta(scale) if isinstance(retrieval, Dipr) else 0.0,
            "k": min(retrieval.k, max(self.codes.tokens, 1)) if isinstance(retrieval, TopK) else 0,
            "scale": scale,
            "patience": settings.patience,
            "least": settings.least,
            "slack": settings.slack,
            "dense_share": settings.dense,
            "budget": settings.budget,
        }

    def _walk(
        self, queries: Queries, retrieval: Dipr | TopK, *, give_up: bool, listed: bool = False, share: bool = True
    ) -> SearchResult:
        fields = _native.graph_search(
            self.codes.native,
            self.blocks.native,
            queries.native,
            *self._begins(),
            **self._limits(retrieval, queries.scale),
            listed=listed,
            share=share,
            give_up=give_up,
        )
        return SearchResult.of_kernel(queries, fields, tail=False, give_up=give_up)

    def _everything(self, queries: Queries) -> SearchResult:
        heads, n = queries.q.shape[:2]
        shown = np.ones(self.codes.tokens, np.bool_)
        if queries.hidden is not None:
            bits = np.unpackbits(queries.hidden.view(np.uint8), bitorder="little", count=self.codes.tokens)
            shown = bits == 0
        seen = [np.flatnonzero(shown[begin:end]) + begin for begin, end in zip(queries.begin, queries.end, strict=True)]
        active = np.ones(queries.kv_heads, np.bool_) if queries.active_heads is None else queries.active_heads
        rows = [row if active[head * queries.kv_heads // heads] else row[:0] for head in range(heads) for row in seen]
        ids = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int32)
        offsets = np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int64)
        scores = np.empty(len(ids), np.float32)
        _native.score(self.blocks.native, queries.native, offsets, ids, scores)
        none = np.full((heads, n), -np.inf, np.float32)
        keys = len(np.unique(np.concatenate(seen))) * queries.heads if seen else 0
        return SearchResult(offsets, ids, scores, keys, int(keys * self.blocks.key_nbytes), none, none.copy())

    def verify(self) -> None:
        """Check links and codes, and that every token can be reached from token 0. Raises IndexCorrupt."""
        self.codes.verify(self.blocks)
        for head in range(self.blocks.kv_heads):
            lost = _native.graph_verify(self.codes.native, head)
            if lost:
                raise IndexCorrupt(f"{lost} tokens of KV head {head} cannot be reached by links; build the index again")

    def save(self, path: Path, ask: Ask = unlimited) -> None:
        """See `indexes.base.Index`. Raises OSError."""
        header, arrays = self.codes.saved()
        header |= {"settings": asdict(self.settings), "blocks": self.blocks.identity()}
        index_file.write(path, self.kind, header, arrays | {"starts": self.starts}, ask)

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `indexes.base.Index`. Raises IndexCorrupt, or OSError."""
        settings, codes, learnt = restore(*index_file.read(path, cls.kind), blocks, path)
        return cls(blocks, settings, codes, learnt)

    def cost(
        self, tokens: int, rows: int, retrieval: Retrieval, *, expected_tokens: float | None = None, heads: int | None = None
    ) -> Cost:
        """See `indexes.base.Index`, and `indexes.hnsw.cost` for the formula."""
        active = self.blocks.kv_heads if heads is None else heads
        return _cost.of(self.blocks, self.settings, (tokens, rows, active), retrieval, expected_tokens)
