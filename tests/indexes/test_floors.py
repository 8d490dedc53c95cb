"""Every kind x dtype x retrieval on keys and queries as heads show them: so much is found, judged by the exact oracle."""

from functools import lru_cache

import numpy as np
import pytest

from benchmarks.workloads import Shape, generate
from indexes.base import Queries
from indexes.blocks import DTYPES, Blocks
from indexes.oracle import Oracle
from indexes.recall import measure
from indexes.registry import KINDS, build
from indexes.retrieval import Dipr, Exact, TopK, TopP

TOKENS, KV_HEADS, HEAD_DIM = 5120, 2, 64
WINDOW = 64, 256
EXACT = {"flat", "coarse-bounds"}
RETRIEVALS = [Exact(), Dipr(0.012), TopK(100), TopP(0.9)]


@lru_cache(maxsize=8)
def asked(workload, dtype):
    shape = Shape(TOKENS, kv_heads=KV_HEADS, group=4, head_dim=HEAD_DIM, dtype=DTYPES[dtype])
    work = generate(workload, shape, queries=3, query_samples=64)
    blocks = Blocks.of(np.asarray(work.k), np.asarray(work.v))
    oracle = Oracle(blocks, Queries.of(work.queries, KV_HEADS, HEAD_DIM**-0.5, TOKENS), WINDOW)
    return blocks, oracle, work.query_samples


@lru_cache(maxsize=64)
def made(kind, workload, dtype):
    blocks, _, query_samples = asked(workload, dtype)
    return build(kind, blocks, query_samples)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workload", ["sharp", "diffuse"])
@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_so_much_is_found(kind, retrieval, workload, dtype):
    _, oracle, _ = asked(workload, dtype)
    report = measure(made(kind, workload, dtype), oracle.queries, retrieval, repetitions=1, oracle=oracle)
    assert report.bound_valid == 1
    if kind in EXACT or retrieval == Exact():
        assert report.recall == 1
    elif not isinstance(retrieval, TopP):  # which tokens make up a mass depends on estimates of it
        assert report.recall >= (0.98 if workload == "sharp" else 0.85)
    if isinstance(retrieval, TopP):
        assert report.mass >= retrieval.p - (0 if kind in EXACT else 0.02)
        assert report.found <= 1.3 * report.relevant + 2
    if workload == "sharp" and isinstance(retrieval, Dipr):
        assert report.error <= 0.015
