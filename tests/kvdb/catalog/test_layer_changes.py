"""What is found out about one layer ends no plan of another."""

import numpy as np

import kvdb
from kvdb.catalog.evidence.layer_changes import LayerChanges

SPEC = kvdb.ModelSpec("m", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
TOKENS = 1200


def test_a_change_of_one_layer_counts_for_it_and_in_all():
    changes = LayerChanges()
    one, other = changes.of(0), changes.of(1)
    changes.advance(0)
    assert (one.value, other.value, changes.version) == (1, 0, 1)
    changes.advance()
    assert (one.value, other.value, changes.version) == (2, 1, 2)
    assert changes.of(0) is one


def test_an_index_of_one_layer_ends_the_plan_of_that_layer_alone(engine):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, TOKENS, 16), np.float32) for _ in range(2))
    writing = engine.begin_import(SPEC, np.arange(TOKENS, dtype=np.int32), "doc")
    for layer in range(SPEC.layers):
        writing.write(layer, k, v)
    writing.commit()
    session = engine.create_session(SPEC, np.arange(TOKENS, dtype=np.int32))
    options = session.layer(0).resolve(kvdb.QueryOptions())
    before = [session.layer(number).planner.prepare(1, options) for number in range(SPEC.layers)]
    session.views[0].segment.indexes.changes.advance(0)
    after = [session.layer(number).planner.prepare(1, options) for number in range(SPEC.layers)]
    assert [one is other for one, other in zip(before, after, strict=True)] == [False, True]
    session.close()
