"""Recomputes tokens of the chunks below a session: CacheBlend's partial recompute (arXiv 2405.16444), layer by layer."""

from math import inf

import numpy as np

from indexes.base import Float32
from kvdb.attention.materialized import MaterializedKeys
from kvdb.attention.state import beyond_float32
from kvdb.blend.controller import Choice, Chunks, Rates, choose
from kvdb.blend.deviation import measured, score_name
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.errors import InvalidArgument, PositionError
from kvdb.session.layer import Layer
from kvdb.storage.block_table import BlockTable
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, ModelSpec, Positions


class Recomputing:
    """The recomputed tokens of one session: their overlays, and the attention of their queries."""

    def __init__(self, spec: ModelSpec, snapshot: Snapshot) -> None:
        """It has to be made before segments are loaded from disk, because it notes where they lie."""
        self._spec = spec
        self._snapshot = snapshot
        self._materialized = MaterializedLayer(snapshot)
        self._choice: Choice | None = None
        self._tokens_by_tier = {} if snapshot.overlay is None else snapshot.tiers()

    def plan(self, load_rate: float | None, seconds: float | None, floor: float, ratio: float | None) -> Choice:
        """How much to recompute; see `kvdb.session.state.SessionState.plan_recompute`. load_rate: bytes a second from disk, None
        before any was measured."""
        speeds = {"cpu": inf} if load_rate is None else {"cpu": inf, "disk": load_rate}
        chunks = Chunks(self._tokens_by_tier, self._spec.token_nbytes, len(self._spec.kept), len(self._snapshot.layout.gaps))
        self._choice = choose(Rates(seconds, speeds), chunks, floor, ratio)
        return self._choice

    def notes(self, number: int) -> tuple[str, ...]:
        """The lines of EXPLAIN about chunks in one layer; none for a session over a prefix."""
        if self._snapshot.overlay is None:
            return ()
        blended = f"Blend: {self._snapshot.describe(number)}"
        return (blended,) if self._choice is None else (blended, f"Controller: {self._choice}")

    def overlay(self, layer: Layer, positions: Positions, k: Array, v: Array) -> None:
        """Add recomputed tokens to a layer. Raises PositionError for a token that was recomputed already, InvalidArgument,
        NonFiniteError or CapacityError."""
        self._check_laid_out()
        again = np.intersect1d(positions, self._snapshot.overlaid(layer.number))
        if len(again):
            raise PositionError(f"position {again[0]} of layer {layer.number} was recomputed already; expected each once")
        layer.overlay(positions, k, v)

    def attention(self, layer: Layer, q: Array, positions: Positions) -> Array:
        """Attention of queries `[q_heads, n, head_dim]` at these positions, each over everything up to its own. Raises
        InvalidArgument, or NonFiniteError where float32 cannot hold a result."""
        self._check_laid_out()
        state = self._materialized.of(layer.number, layer.tail).attend(q, positions, layer.shape.softmax_scale)
        if not layer.tail.layout.finite(state.out, state.lse):
            raise beyond_float32()
        return state.out

    def measure_deviation(self, layer: Layer, positions: Positions, k: Array, v: Array, score: str | None) -> Float32:
        """Measures of how far fresh KV is from the layer's stored KV, float32 `[2, n]`, NaN for gaps. Raises InvalidArgument."""
        self._check_laid_out()
        score_name(score)
        stored = self._materialized.of(layer.number, layer.tail).read(positions)
        for array in stored:
            array[:, np.isin(positions, layer.missing())] = np.nan  # the memory of a gap holds nothing meaningful
        return measured(k, v, *stored, score)

    def forget(self) -> None:
        """Free the memory that only recomputing needs."""
        self._materialized.forget()

    def _check_laid_out(self) -> None:
        if self._snapshot.overlay is None:
            raise InvalidArgument("the session stands on a prefix, of which nothing is recomputed; open it with parts=")


class MaterializedLayer:
    """The layer that is being recomputed, with all keys at their true positions. Holds one layer at a time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._number: int | None = None
        self._rows = 0
        self._materialized: MaterializedKeys | None = None

    def of(self, number: int, tail: BlockTable) -> MaterializedKeys:
        """The keys and values of a layer as it is now. tail: gives the layout of its blocks."""
        snapshot = self._snapshot
        assert snapshot.overlay is not None
        assert snapshot.moves is not None
        if self._materialized is None:
            self._materialized = MaterializedKeys(tail.layout, snapshot.layout.length)
        materialized, overlaid = self._materialized, snapshot.overlaid(number)
        if self._number != number:
            self._number = None
            with pinned(snapshot.pages(number)):
                for i, view in enumerate(snapshot.views):
                    turn, table = snapshot.moves.angles_of(i), view.segment.tables[number]
                    materialized.place(table, view.visible, view.begin, turn, interleaved=snapshot.moves.interleaved)
            self._number, self._rows = number, 0
        materialized.scatter(snapshot.overlay.tables[number], overlaid[self._rows :], self._rows)
        self._rows = len(overlaid)
        return materialized

    def forget(self) -> None:
        """Give the memory back."""
        self._materialized, self._number = None, None
