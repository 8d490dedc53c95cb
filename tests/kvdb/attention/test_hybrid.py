"""What two devices answer together, where one of them misses something."""

import numpy as np
import pytest

import kvdb
from indexes.retrieval import Dipr, Exact
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.device import Answer
from kvdb.attention.hybrid import hybrid_attention
from kvdb.attention.partition import RunPartition
from kvdb.attention.query import AttentionQuery
from kvdb.attention.state import AttentionState
from kvdb.config import StorageConfig
from kvdb.storage.store import BlockStore
from query_optimizer.query_options import QueryOptions
from tests.reference import attention, relative_error

BLOCK, TOKENS = 16, 96
SPEC = kvdb.ModelSpec("m", layers=1, q_heads=2, kv_heads=1, head_dim=16, dtype="float32")


class Device:
    """Answers the first four blocks: of two of them as planned, of all where everything is asked for."""

    tail = False
    spans = (Span(0, 4 * BLOCK, 0),)

    def __init__(self, k, v):
        self.k, self.v = k, v

    def takes(self, n):
        return n == 1

    def launch(self, q, retrieval):
        tokens = 4 * BLOCK if isinstance(retrieval, Exact) else 2 * BLOCK
        out, lse = attention(q, self.k[:, :tokens], self.v[:, :tokens], SPEC.softmax_scale)
        _, rest = attention(q, self.k[:, tokens : 4 * BLOCK], self.v[:, tokens : 4 * BLOCK], SPEC.softmax_scale)
        missed = (rest if tokens < 4 * BLOCK else np.full_like(lse, -np.inf)).astype(np.float32)
        state = AttentionState(out.astype(np.float32), lse.astype(np.float32))
        self.answer = Answer(state, missed, missed, tokens, tokens, tokens)
        return self

    def result(self):
        return self.answer


@pytest.mark.parametrize(
    ("options", "guard", "exact"),
    [
        (QueryOptions(), 0.01, True),
        (QueryOptions(), 100.0, False),
        (QueryOptions(max_missed_mass=0.01), None, True),
        (QueryOptions(Dipr()), None, False),
    ],
    ids=["a guard", "a guard that holds", "a bound", "a range"],
)
def test_a_device_that_misses_much_reads_on_unless_the_caller_named_a_range(rng, options, guard, exact):
    k, v, q = (rng.standard_normal((heads, n, 16)).astype(np.float32) for heads, n in ((1, TOKENS), (1, TOKENS), (2, 1)))
    store = BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20))
    stored, tail = store.tables(SPEC)[0], store.tables(SPEC)[0]
    stored.append(k, v)
    run, device = BlockRun([(stored, TOKENS)], tail), Device(k, v)
    query = AttentionQuery(stored.layout, run, q, SPEC.softmax_scale, options)
    partition = RunPartition([], BLOCK, device=device)
    partition.guards = None if guard is None else np.log(np.float32([guard]))
    state, stats = hybrid_attention(query, partition, device, Dipr())
    right = attention(q, k, v, SPEC.softmax_scale)[0]
    assert (relative_error(state.out, right) < 1e-5) == exact
    assert (stats.missed == 0) == exact
    stored.release()
    store.close()
