"""What statistics say of audits: the least bound of any way, for every query head of a KV head."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.retrieval import Dipr, TopK
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.audited_errors import audited_errors
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.way_record import Audit
from query_optimizer.order_statistics import AUDITS_MIN, upper_bound
from query_optimizer.ways import Way

FAST, SLOW = Way("flat", Dipr(0.012)), Way("flat", Dipr(0.001))
LAYERS, KV_HEADS, GROUP = 3, 2, 4
HEADS = LAYERS * [KV_HEADS * GROUP]


def add(evidence, layer, way, errors):
    """Take in audits. errors: `[kv_heads, n]`."""
    all_heads = np.ones(KV_HEADS, np.bool_)
    evidence.add(
        layer,
        way,
        Audit(
            errors, np.full_like(errors, -9), np.zeros((SIGNS, len(errors), errors.shape[1]), np.float32), all_heads, errors < 0
        ),
    )


def by_kv_head(array):
    """`[layers, kv_heads]`, after a check that the query heads of each KV head say the same."""
    split = array.reshape(LAYERS, KV_HEADS, GROUP)
    assert (split == split[..., :1]).all()
    return split[..., 0]


def test_nothing_is_known_without_audits():
    audits, errors = audited_errors(Evidence(), HEADS)
    assert (audits.dtype, errors.dtype) == (np.int64, np.float32)
    assert not audits.any()
    assert np.isinf(errors).all()
    for array in (audits, errors):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


@given(st.integers(1, 2 * AUDITS_MIN), st.integers(1, 2 * AUDITS_MIN), st.randoms(use_true_random=False))
def test_the_way_that_errs_least_speaks_for_a_head(fast, slow, random):
    rng = np.random.default_rng(random.randrange(1 << 30))
    samples = {FAST: rng.random((KV_HEADS, fast), np.float32), SLOW: rng.random((KV_HEADS, slow), np.float32)}
    evidence = Evidence()
    for way, errors in samples.items():
        add(evidence, 1, way, errors)
    audits, errors = map(by_kv_head, audited_errors(evidence, HEADS))
    assert not audits[[0, 2]].any()
    assert np.isinf(errors[[0, 2]]).all()
    for head in range(KV_HEADS):
        bounds = {way: float(upper_bound(each[head])) for way, each in samples.items()}
        assert errors[1, head] == np.float32(min(bounds.values()))
        if np.isinf(errors[1, head]):
            assert audits[1, head] == max(fast, slow)
        elif bounds[FAST] != bounds[SLOW]:
            assert audits[1, head] == samples[min(bounds, key=bounds.get)].shape[1]


def test_heads_differ_in_which_way_that_is():
    evidence = Evidence()
    add(evidence, 0, FAST, np.tile(np.float32([[0.01], [0.5]]), AUDITS_MIN))
    add(evidence, 0, SLOW, np.tile(np.float32([[0.02], [0.03]]), AUDITS_MIN + 1))
    add(evidence, 0, Way("coarse-clusters", TopK(64), estimate_tail=True), np.zeros((KV_HEADS, 3), np.float32))
    audits, errors = map(by_kv_head, audited_errors(evidence, HEADS))
    assert errors[0] == pytest.approx([0.01, 0.03])
    assert audits[0].tolist() == [AUDITS_MIN, AUDITS_MIN + 1]
