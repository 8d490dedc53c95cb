"""Moving the query back is moving the key forth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.rotation import inverse_frequencies, rotate


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@given(shift=st.integers(-100_000, 100_000), rotary_dims=st.sampled_from([8, 16, 24]), seed=st.integers(0, 1000))
def test_a_rotated_query_sees_moved_keys(layout, shift, rotary_dims, seed):
    rng = np.random.default_rng(seed)
    q, keys = rng.standard_normal((3, 24)).astype(np.float32), rng.standard_normal((5, 24)).astype(np.float32)
    frequencies = inverse_frequencies(10_000.0, rotary_dims)
    moved = rotate(keys, shift, frequencies, layout)
    np.testing.assert_allclose(rotate(q, -shift, frequencies, layout) @ keys.T, q @ moved.T, atol=1e-4)
    np.testing.assert_array_equal(moved[:, rotary_dims:], keys[:, rotary_dims:])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_moves_add_up_and_keep_lengths(layout):
    x = np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32)
    frequencies = inverse_frequencies(500_000.0, 16)
    twice = rotate(rotate(x, 300, frequencies, layout), 21, frequencies, layout)
    np.testing.assert_allclose(twice, rotate(x, 321, frequencies, layout), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(twice, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)


def test_agrees_with_rope_as_models_apply_it():
    """One pair at position 1 with frequency f turns by f radians, from the first towards the second dimension."""
    x = np.array([[1.0, 0.0, 0.0, 0.0]], np.float32)
    np.testing.assert_allclose(rotate(x, 1, np.array([0.5, 0.1])), [[np.cos(0.5), 0, np.sin(0.5), 0]], atol=1e-7)
    interleaved = rotate(x, 1, np.array([0.5, 0.1]), "interleaved")
    np.testing.assert_allclose(interleaved, [[np.cos(0.5), np.sin(0.5), 0, 0]], atol=1e-7)
