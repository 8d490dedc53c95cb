"""Recomputing tokens of what a session stands on: CacheBlend's partial recompute (arXiv 2405.16444), layer by layer."""

from math import inf

import numpy as np

from indexes.base import Float32
from kvdb.attention.effective import Effective
from kvdb.basis import Basis
from kvdb.blend.controller import Choice, Chunks, Rates, choose
from kvdb.blend.deviation import deviation, score_name
from kvdb.errors import InvalidArgument, PositionError
from kvdb.layer import Layer
from kvdb.storage.table import BlockTable
from kvdb.types import Array, ModelSpec, Positions


class Recomputing:
    """Overlays for a session, and the attention of the tokens they are made of."""

    def __init__(self, spec: ModelSpec, basis: Basis) -> None:
        """To be made before what lies on disk is brought in."""
        self._spec = spec
        self._basis = basis
        self._scratch = Scratch(basis)
        self._choice: Choice | None = None
        self._lay_in = {} if basis.overlay is None else basis.tiers()

    def plan(self, load_rate: float | None, seconds: float | None, floor: float, ratio: float | None) -> Choice:
        """How much to recompute; see `kvdb.session.SessionState.plan_recompute`. load_rate: bytes a second from disk."""
        speeds = {"cpu": inf} if load_rate is None else {"cpu": inf, "disk": load_rate}
        chunks = Chunks(self._lay_in, self._spec.token_nbytes, self._spec.layers, len(self._basis.layout.gaps))
        self._choice = choose(Rates(seconds, speeds), chunks, floor, ratio)
        return self._choice

    def notes(self, number: int) -> tuple[str, ...]:
        """What EXPLAIN says of a layer that was laid out of chunks."""
        if self._basis.overlay is None:
            return ()
        blended = f"Blend: {self._basis.describe(number)}"
        return (blended,) if self._choice is None else (blended, f"Controller: {self._choice}")

    def overlay(self, layer: Layer, positions: Positions, k: Array, v: Array) -> None:
        """Raises PositionError for a token that has an overlay, InvalidArgument, NonFiniteError or CapacityError."""
        self._check_laid_out()
        again = np.intersect1d(positions, self._basis.overlaid(layer.number))
        if len(again):
            raise PositionError(f"position {again[0]} of layer {layer.number} was recomputed already; expected each once")
        layer.overlay(positions, k, v)

    def attention(self, layer: Layer, q: Array, positions: Positions) -> Array:
        """Of queries `[q_heads, n, head_dim]` at these positions. Raises InvalidArgument."""
        self._check_laid_out()
        return layer.recompute(self._scratch.of(layer.number, layer.tail), q, positions)

    def deviation(self, layer: Layer, positions: Positions, k: Array, v: Array, score: str | None) -> Float32:
        """Of fresh KV from what the layer holds, `[n]`, infinite for gaps. Raises InvalidArgument."""
        self._check_laid_out()
        score_name(score)
        stored = self._scratch.of(layer.number, layer.tail).read(positions)
        for array in stored:
            array[:, np.isin(positions, layer.missing())] = np.nan  # what a gap's memory holds says nothing
        return deviation(k, v, *stored, score)

    def forget(self) -> None:
        """Give memory back that only recomputing needs."""
        self._scratch.forget()

    def _check_laid_out(self) -> None:
        if self._basis.overlay is None:
            raise InvalidArgument("the session stands on a prefix, of which nothing is recomputed; open it with parts=")


class Scratch:
    """The layer that is being recomputed, as one run of keys at their true positions. Holds one layer at a time."""

    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        self._number: int | None = None
        self._rows = 0
        self._effective: Effective | None = None

    def of(self, number: int, tail: BlockTable) -> Effective:
        """The layer as it is now. tail: of it, for the form of its blocks."""
        basis = self._basis
        assert basis.overlay is not None
        assert basis.moves is not None
        if self._effective is None:
            self._effective = Effective(tail.layout, basis.layout.length)
        effective, overlaid = self._effective, basis.overlaid(number)
        if self._number != number:
            self._number, self._rows = number, 0
            for i, view in enumerate(basis.views):
                turn, table = basis.moves.angles_of(i), view.segment.tables[number]
                effective.place(table, view.visible, view.begin, turn, interleaved=basis.moves.interleaved)
        effective.scatter(basis.overlay.tables[number], overlaid[self._rows :], self._rows)
        self._rows = len(overlaid)
        return effective

    def forget(self) -> None:
        """Give the memory back."""
        self._effective, self._number = None, None
