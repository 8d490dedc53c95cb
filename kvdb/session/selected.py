"""Queries of a model that selects tokens itself: what its indexer chooses is attended exactly, and nothing else."""

from contextlib import ExitStack
from threading import RLock
from typing import Protocol

import numpy as np

import kvdb.attention.exact as exact_attention
import kvdb.attention.trained as trained
import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.attention.state import AttentionState, beyond_float32
from kvdb.attention.trained import Indexed, IndexerQueries, LastSelected
from kvdb.errors import PositionError
from kvdb.session.counters import SessionCounters
from kvdb.session.layer import Layer
from kvdb.storage.paged_segment import pinned
from kvdb.types import Array, Attention, Description, Float32, ModelSpec

RULE = "trained"
"""Under which such queries are counted beside the rules of the optimizer."""


class SelectingSession(Protocol):
    """What such queries need of a session; see `kvdb.session.state.SessionState`."""

    spec: ModelSpec
    counters: SessionCounters
    turns: RLock

    def layer(self, number: int, *, indexer: bool = False) -> Layer: ...

    def append(self, layer: Layer, k: Array, v: Array) -> None: ...


def attend(
    session: SelectingSession,
    number: int,
    q: Array,
    kv: tuple[Array, Array] | None,
    asked: tuple[Float32, Float32],
    start: int | None = None,
) -> Array:
    """Append tokens to one layer, or with None for kv nothing, and answer the queries of its last n tokens over those that its
    indexer selects of the tokens that each sees.

    asked: the indexer's queries, float32 `[heads, n, dim]`, and weights, float32 `[heads, n]`. The indexer's keys of the new
    tokens were handed in before. Raises LayerError for a layer without an indexer, ShapeError, DtypeError, NonFiniteError,
    PositionError, CapacityError or SessionClosed, and then nothing was appended.
    """
    with session.turns, ExitStack() as undo:
        deadlines.check()
        place = validate.own_place(session.spec, number)
        indexer, layer = session.layer(number, indexer=True), session.layer(number)
        n = layer.check_queries(q)
        selection = IndexerQueries(*validate.selection(indexer.shape, number, n, *asked))
        if kv is not None:
            validate.same_tokens(n, validate.keys_values(layer.shape, *kv))
            validate.start_of(start, layer.run.tokens, number)
        held = layer.run.tokens + (0 if kv is None else n)
        if indexer.run.tokens != held:
            raise PositionError(
                f"the indexer of layer {number} has keys of {indexer.run.tokens} tokens; expected {held}, so update it first"
            )
        if kv is not None:
            session.append(layer, *kv)
            undo.callback(layer.truncate, n)
        layer.check_last(n)
        out = _answered(
            session, layer, Indexed(indexer.tail.layout, indexer.run, _top(session.spec, place)), q, selection, indexer
        )
        undo.pop_all()
    return out


def _answered(
    session: SelectingSession, layer: Layer, indexed: Indexed, q: Array, selection: IndexerQueries, indexer: Layer
) -> Array:
    layout, scale = layer.tail.layout, layer.shape.softmax_scale
    with pinned((*layer.pages, *indexer.pages)):
        if layer.run.tokens <= indexed.top:
            positions = np.arange(layer.run.tokens, dtype=np.int32)
            state, stats = exact_attention.exact(layout, layer.run, q, q.shape[1], scale, sinks=layer.sinks)
        else:
            selected = indexed.select(selection)
            positions = selected.of(-1).copy()
            state, stats = trained.attend(layout, layer.run, q, selected, scale, layer.sinks)
    if not layout.finite(state.out, state.lse):
        raise beyond_float32()
    layer.query_samples.add(q)
    layer.selected = LastSelected(q[:, -1:].copy(), positions, AttentionState(state.out[:, -1:], state.lse[:, -1:]))
    session.counters.count_by(RULE, stats, layer.run.tokens)
    return state.out


def notes(layer: Layer, described: Description, *, analyze: bool) -> tuple[str, ...]:
    """The lines of EXPLAIN about a model's own selection. analyze: whether to say what the last one missed."""
    if not isinstance(described, Attention) or described.indexer is None:
        return ()
    told = f"Trained: the model selects {described.indexer.top:,} of {layer.run.tokens:,} tokens, where its indexer is asked"
    last = layer.selected
    if last is None or not analyze:
        return (told,)
    exact, _ = exact_attention.exact(layer.tail.layout, layer.run, last.q, 1, layer.shape.softmax_scale, sinks=layer.sinks)
    missed = float(np.mean(1 - np.exp(last.state.lse - exact.lse)))
    whole, kept = (one.out.astype(np.float64) for one in (exact, last.state))
    error = float(np.linalg.norm(whole - kept)) / max(float(np.linalg.norm(whole)), 1e-30)
    shares = f"missed {missed:.2%} of the softmax mass, and was {error:.2%} off"
    return told, f"Its last query attended {len(last.positions):,} tokens, {shares}"


def _top(spec: ModelSpec, place: int) -> int:
    described = spec.all_layers[spec.kept[place].layer]
    assert isinstance(described, Attention)
    assert described.indexer is not None
    return described.indexer.top
