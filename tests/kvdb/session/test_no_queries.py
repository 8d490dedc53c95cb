"""A query of no tokens has an empty answer, whatever would be searched."""

import numpy as np
import pytest

import kvdb
from tests.database import searching_config

SPEC = kvdb.ModelSpec("tiny", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
TOKENS = 600
QUERIES = [{}, {"retrieval": kvdb.Dipr()}, {"retrieval": kvdb.TopK(5)}, {"max_missed_mass": 0.1}, {"retrieval": kvdb.Exact()}]


@pytest.mark.parametrize("kind", ["", "flat", "quantized", "coarse-bounds", "coarse-means", "hnsw"])
def test_it_is_empty(kind):
    k = np.random.default_rng(0).standard_normal((2, TOKENS, 16)).astype(np.float32)
    none = np.empty((4, 0, 16), np.float32), np.empty((2, 0, 16), np.float32)
    with kvdb.connect(config=searching_config()) as db:
        db.import_context(SPEC, np.arange(TOKENS), [(k, k)], name="doc")
        if kind:
            db.build_index("doc", kind)
        with db.create_session(SPEC, np.arange(TOKENS)) as session:
            for query in QUERIES:
                assert session.attention(0, none[0], **query).shape == none[0].shape
                assert session.attend(0, none[0], none[1], none[1], **query).shape == none[0].shape
                assert db.attention([session], 0, none[0][None], **query).shape == (1, *none[0].shape)
                assert db.attend([session], 0, *(array[None] for array in (none[0], none[1], none[1])), **query).shape[2] == 0
            assert session.stats().tokens == TOKENS
