"""What the fuzzer of the native boundary does with `kvdb._native`: a run of blocks, filled, moved about and attended."""

from __future__ import annotations

from typing import Any

import numpy as np

import tests.fuzz.storage as storage
from tests.fuzz.values import Table


def run_of(rng: np.random.Generator, geometry: Any) -> tuple[Table, np.ndarray]:
    """Up to 12 blocks, and their memory, which must outlive their addresses. Every bit is 0: a finite number."""
    memory = np.zeros((int(rng.integers(1, 13)), geometry.block_bytes), np.uint8)
    table = memory.ctypes.data + np.arange(len(memory)) * geometry.block_bytes
    return table.astype(np.uint64).view(Table), memory


def values_of(rng: np.random.Generator, head_dim: int) -> tuple[Any, ...]:
    """As keys are; shorter or longer, or none; or in keys."""
    if rng.random() < 0.5:
        return ()
    in_keys = bool(rng.random() < 0.5)
    return 8 * int(rng.integers(in_keys, (head_dim if in_keys else 640) // 8 + 1)), in_keys


def use(rng: np.random.Generator, native: Any) -> list[Any]:
    """Calls as a session makes them. Returns the blocks, which must live as long as calls with their addresses are made."""
    kv_heads, group, n = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 5, 30]))
    head_dim, size = 8 * int(rng.integers(1, 33)), int(rng.choice([1, 3, 16, 64, 100]))
    dtype = [native.Dtype.float32, native.Dtype.float16, native.Dtype.bfloat16][rng.integers(3)]
    element = np.float32 if dtype == native.Dtype.float32 else np.uint16
    geometry = native.Geometry(dtype, kv_heads, head_dim, size, *values_of(rng, head_dim))
    value_dim = geometry.value_dim
    (source, kept), (target, moved) = run_of(rng, geometry), run_of(rng, geometry)

    def some(*shape: int, of: Any = element) -> np.ndarray:
        return rng.integers(0, 0x3F, shape).astype(of)  # small numbers as floats, and finite ones as bits

    tokens = min(len(source), len(target)) * size
    k, v, q = some(kv_heads, tokens, head_dim), some(kv_heads, tokens, value_dim), some(kv_heads * group, n, head_dim)
    native.append(geometry, source, 0, k, v)
    native.finite(geometry, k)
    native.finite(geometry, q, np.zeros(q.shape[:2], np.float32))
    native.gather(geometry, source, 0, tokens, k, v)
    native.copy(geometry, source, 0, target, 0, tokens)
    native.read_blocks(geometry, source)
    pairs, views = int(rng.integers(0, head_dim // 2 + 1)), int(rng.integers(1, 5))
    cos, sin = rng.standard_normal((2, views, pairs)).astype(np.float32)
    positions = rng.permutation(tokens)[: int(rng.integers(0, tokens + 1))].astype(np.int64)
    angles = (None, None) if geometry.values_in_keys else (cos[0], sin[0])
    native.place(geometry, source, 0, target, 0, tokens, *angles, True)
    native.scatter(geometry, source, 0, target, positions)
    native.gather_at(geometry, target, positions, k[:, : len(positions)], v[:, : len(positions)])
    native.rotate(geometry, q, cos[0], sin[0], False, q)
    indexed(rng, native, geometry, source, q)
    if value_dim:
        attended(rng, native, geometry, source, q, cos, sin)
        stepped(rng, native, geometry, source, some(kv_heads * group, 1, head_dim))
        turn = some(3, kv_heads * group, 1, head_dim), some(3, kv_heads, 1, head_dim), some(3, kv_heads, 1, value_dim)
        together(rng, native, geometry, source, list(turn))
    return [kept, moved, *storage.use(rng, native, geometry, source)]


def attended(rng: np.random.Generator, native: Any, geometry: Any, table: Table, q: Any, cos: Any, sin: Any) -> None:
    """By every query, over a placement of the whole run, and over chosen tokens."""
    heads, n = q.shape[:2]
    size, blocks = geometry.block_size, len(table)
    counts = rng.integers(0, size + 1, blocks).astype(np.int32)
    view = rng.integers(-1, len(cos), blocks).astype(np.int32)
    hidden = rng.integers(0, 1 << 63, (blocks, -(-size // 64)), np.uint64) if rng.random() < 0.5 else None
    ends = np.sort(rng.integers(0, int(counts.sum()) + 1, n)).astype(np.int64)
    out = np.zeros((heads, n, geometry.value_dim), np.float32)
    lse, top = np.zeros((heads, n), np.float32), np.zeros((heads, n), np.float32)
    masks = {"sinks": rng.standard_normal(heads).astype(np.float32), "window": int(rng.integers(0, 200))}
    native.attend(geometry, q, table, counts, 0, 0.1, out, lse, top, 0, geometry.kv_heads, ends=ends, **masks)

    def placed(view: Any, cos: Any, sin: Any, interleaved: Any, hidden: Any, ends: Any, counts: Any, window: Any) -> None:
        placement = native.Placement(view, cos, sin, interleaved, hidden)
        native.attend(geometry, q, table, counts, 0, 0.1, out, lse, top, ends=ends, placement=placement, window=window)

    limits = ends if rng.random() < 0.5 else None
    native.made(placed, view, cos, sin, bool(rng.random() < 0.5), hidden, limits, counts, masks["window"])
    rows = heads * n
    offsets = np.sort(np.concatenate([[0], rng.integers(0, 100, rows)])).astype(np.int64)
    ids = rng.integers(0, blocks * size, offsets[-1]).astype(np.int32)
    scores = rng.standard_normal(len(ids)).astype(np.float32)
    native.attend_retrieved(geometry, table, offsets, ids, scores, 0.1, out, lse, out.copy(), lse.copy())
    native.merge_tail(geometry, out, lse, out.copy(), lse.copy(), out.copy(), lse.copy())


def indexed(rng: np.random.Generator, native: Any, geometry: Any, table: Table, q: Any) -> None:
    """By the tokens that an indexer selects, whose keys lie in blocks of their own, here the same memory."""
    keys = native.Geometry(geometry.dtype, 1, geometry.head_dim, geometry.block_size, 0)
    counts = rng.integers(0, geometry.block_size + 1, len(table)).astype(np.int32)
    tokens, n, heads = int(counts.sum()), q.shape[1], int(rng.choice([1, 3, 16, 40]))
    queries = (rng.standard_normal((heads, n, geometry.head_dim)) * 10.0 ** rng.integers(-6, 4)).astype(np.float32)
    weights = rng.standard_normal((heads, n)).astype(np.float32)
    native.indexer_scores(keys, queries, weights, table, counts, np.zeros((n, tokens), np.float32))
    ids, found = np.zeros((n, int(rng.integers(0, 100))), np.int32), np.zeros(n, np.int32)
    if n <= tokens:
        native.indexer_select(keys, queries, weights, table, counts, ids, found)
    if geometry.value_dim:
        out, lse = np.zeros((len(q), n, geometry.value_dim), np.float32), np.zeros((len(q), n), np.float32)
        sinks = rng.standard_normal(len(q)).astype(np.float32)
        native.attend_chosen(geometry, q, table, counts, ids, found, 0.1, out, lse, sinks)


def stepped(rng: np.random.Generator, native: Any, geometry: Any, table: Table, q: Any) -> None:
    """A step that searches the run, and reads it whole as window, sinks, and for some KV heads."""
    from indexes.blocks import Blocks
    from indexes.flat import Flat
    from indexes.quantized import Quantized
    from indexes.retrieval import Dipr, TopK, TopP
    from indexes.searcher import searcher_of

    heads, size, blocks = len(q), geometry.block_size, len(table)
    counts = rng.integers(0, size + 1, blocks).astype(np.int32)
    tokens = blocks * size
    dtype = str(geometry.dtype).rpartition(".")[2]
    stored = Blocks(
        dtype,
        geometry.kv_heads,
        geometry.head_dim,
        size,
        np.asarray(table),
        tokens,
        value_dim=geometry.value_dim,
        values_in_keys=geometry.values_in_keys,
    )
    index = (Quantized if stored.is_symmetric else Flat).build(stored)
    retrieval = [Dipr(0.1), TopK(5), TopP(0.5)][rng.integers(3)]
    searcher = searcher_of(index, retrieval, 0.1, estimate_tail=stored.is_symmetric and bool(rng.random() < 0.5))
    active = rng.random(geometry.kv_heads) < 0.5 if rng.random() < 0.5 else None
    hidden = rng.integers(0, 1 << 63, -(-tokens // 64), np.uint64) if rng.random() < 0.5 else None
    guards = rng.standard_normal(geometry.kv_heads).astype(np.float32) if rng.random() < 0.5 else None
    ranges = rng.standard_normal((2, 4, heads)).astype(np.float32) if rng.random() < 0.5 else None
    whole = rng.random(geometry.kv_heads) < 0.3

    def step(  # everything that a plan has
        searcher: Any,
        q: Any,
        scale: Any,
        counts: Any,
        begin: Any,
        end: Any,
        grows: Any,
        active: Any,
        hidden: Any,
        guards: Any,
        ranges: Any,
        whole: Any,
        wholes: Any,
        out: Any,
        logs: Any,
        table: Any,
        turn: Any,
        kind: Any,
        parameter: Any,
        observed: Any,
        bound: Any,
        sink_logits: Any,
    ) -> None:
        reads = table, counts, None
        searches = [(searcher, begin, end, reads, active, hidden, True, turn, (kind, parameter))] * 2
        made = native.Step(
            geometry,
            heads,
            scale,
            reads,
            grows,
            reads,
            searches,
            [(reads, wholes, whole)],
            tokens,
            guards,
            ranges,
            0.5,
            0.9,
            bound,
        )
        (result,) = made.run(q, [0], observed, table, counts, out, logs, observed, observed, sink_logits)
        made.observations(result, None if result.end == native.StepEnd.answered else logs[0, 0][:, None], logs[0, 1][:, None])
        [native.StepResult.found(result, i) for i in range(result.searches)]
        native.StepResult.signs(result)
        native.StepResult.unlike(result)
        native.StepResult.given_up(result)

    begin, end = sorted(rng.integers(0, tokens + 1, 2).tolist())
    grows, logs = int(rng.integers(-1, blocks + 1)), np.zeros((1, 3, heads), np.float32)
    cos, sin = rng.standard_normal((2, int(rng.integers(0, geometry.head_dim // 2 + 1)))).astype(np.float32)
    turn = (cos, sin, bool(rng.random() < 0.5)) if rng.random() < 0.5 else None
    cut = [(native.StepCut.range, 2.0), (native.StepCut.top_k, 5.0)][rng.integers(2)]
    asked = (
        active,
        hidden,
        guards,
        ranges,
        whole,
        tokens,
        np.zeros((heads, 1, geometry.value_dim), q.dtype),
        logs,
        table,
        turn,
        *cut,
        bool(rng.random() < 0.5),
        float(rng.random()),
        rng.standard_normal(heads).astype(np.float32) if rng.random() < 0.5 else None,
    )
    native.made(step, searcher, q, 0.1, counts, begin, end, grows, *asked)


def together(rng: np.random.Generator, native: Any, geometry: Any, table: Table, tokens: list[Any]) -> None:
    """Steps of three layers whose runs begin alike, in one call. tokens: q, k and v."""
    heads, size, blocks = tokens[0].shape[1], geometry.block_size, len(table)
    filled = np.full(blocks, size, np.int32)
    filled[-1] = rng.integers(0, size)
    version, options = native.Version(), "what is asked"

    def take(
        table: Any,
        filled: Any,
        blocks: Any,
        view: Any,
        length: Any,
        steps: Any,
        q: Any,
        k: Any,
        v: Any,
        starts: Any,
        out: Any,
        least: Any,
        asked: Any,
        sinks: Any,
        window: Any,
    ) -> None:
        angles = np.ones((1, geometry.head_dim // 2), np.float32)
        placement = None if view is None else native.Placement(view, angles, angles, False, None)
        layers = [native.LayerSteps(geometry, heads, 0.1, q[:0], window) for _ in range(3)]
        for layer in layers:
            layer.set_sinks(sinks)
            layer.follow(options, None, table, filled.copy(), blocks, placement, length, steps, [(version, 0)])
            layer.observe_next(asked, 16, 8)
            layer.sample_next(least, 8)
            layer.keep_last(least)
        native.take_steps(layers, q, k, v, options, starts, out, least)
        native.take_steps(layers[:2] + layers[:1], q, k, v, options, None, out, least)
        layers[0].take_tensors(memoryview, np.dtype)
        for layer, *arrays in zip(layers, q, k, v, strict=False):
            layer.step(*arrays, options, None)
        for layer in layers:
            layer.take_observations(), layer.take_totals(), layer.take_samples(), layer.last_query()
            layer.recent()
            layer.stop()
        version.advance()

    length = int(filled.sum())
    starts = [length] * 3 if rng.random() < 0.5 else None
    view = rng.integers(-1, 1, blocks).astype(np.int32) if rng.random() < 0.5 else None
    least, asked = int(rng.integers(0, 2 * size)), int(rng.integers(-1, 20))
    out = np.zeros((3, heads, 1, geometry.value_dim), tokens[0].dtype)
    sinks, window = rng.standard_normal(heads).astype(np.float32), int(rng.choice([0, 1, 100]))
    given = starts, out, least, asked, sinks if rng.random() < 0.5 else None, window
    native.made(take, table, filled, blocks, view, length, 1, *tokens, *given)
