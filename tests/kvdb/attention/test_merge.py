"""States merge to the attention over the union, in any order and any grouping."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention import AttentionState, merge
from tests.reference import attention, relative_error

HEADS, QUERIES, DIM = 4, 3, 16


def state(q, k, v):
    out, lse = attention(q, k, v, scale=0.25)
    return AttentionState(out.astype(np.float32), lse.astype(np.float32))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.floats(0.1, 30.0), st.randoms(use_true_random=False))
def test_the_merge_of_the_parts_is_the_whole(lengths, sharpness, chance):
    rng = np.random.default_rng(chance.randrange(1 << 30))
    total = sum(lengths)
    q = rng.standard_normal((HEADS, QUERIES, DIM)) * sharpness
    k, v = (rng.standard_normal((2, total, DIM)) for _ in range(2))
    ends = np.cumsum(lengths)
    parts = [state(q, k[:, end - n : end], v[:, end - n : end]) for n, end in zip(lengths, ends, strict=True)]
    chance.shuffle(parts)
    while len(parts) > 1:
        cut = chance.randint(2, len(parts))
        parts = [merge(parts[:cut]), *parts[cut:]]
        chance.shuffle(parts)
    (merged,) = parts
    out, lse = attention(q, k, v, scale=0.25)
    assert relative_error(merged.out, out) <= 1e-5
    assert np.allclose(merged.lse, lse, rtol=1e-5, atol=1e-5)


def test_nothing_merged_with_nothing_is_nothing():
    empty = AttentionState(np.zeros((2, 1, 8), np.float32), np.full((2, 1), -np.inf, np.float32))
    merged = merge([empty, empty])
    assert (merged.out == 0).all()
    assert (merged.lse == -np.inf).all()


def test_logits_beyond_the_exponential_do_not_overflow():
    out = np.ones((1, 1, 8), np.float32)
    merged = merge([AttentionState(out, np.full((1, 1), lse, np.float32)) for lse in (-500.0, 500.0)])
    assert np.isfinite(merged.out).all()
    assert merged.lse == 500.0
