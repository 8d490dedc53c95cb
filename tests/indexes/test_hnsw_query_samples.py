"""What a graph index learns from sample queries."""

from dataclasses import replace

import numpy as np

from indexes.hnsw.query_samples import merged_lists, nearest_keys
from tests.indexes.hnsw_data import layer


def test_nearest_keys_and_lists_are_those_of_brute_force():
    more, _, query_samples = layer(tokens=12_000)
    blocks = replace(more, tokens=9000)
    queries = query_samples[2:4].reshape(-1, 64)
    nearest = nearest_keys(blocks, 1, queries, 30)
    order = np.argsort(-(queries.astype(np.float64) @ blocks.keys(1).astype(np.float64).T), axis=1)[:, :30]
    assert (nearest == order).mean() > 0.999
    pivots, offsets, candidates = merged_lists(nearest)
    merged = {int(p): set(candidates[a:b].tolist()) for p, a, b in zip(pivots, offsets[:-1], offsets[1:], strict=True)}
    for row in nearest:
        assert set(row[1:].tolist()) <= merged[int(row[0])]
    assert len(nearest_keys(replace(blocks, tokens=5), 0, queries, 30)[0]) == 5
