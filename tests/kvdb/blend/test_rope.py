"""Frequencies are those of the model, and a query turned back sees what a moved key shows."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_adapter.transformers import spec_of
from indexes.rotation import rotate
from kvdb.blend.rope import LENGTH_DEPENDENT, SCALINGS, angles, inverse_frequencies
from kvdb.errors import Unsupported
from kvdb.types import Rope
from tests.engine_adapter.tiny import build
from tests.reference import attention

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GIVEN = [
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 1.5, "original_max_position_embeddings": 1024},
    YARN,
    YARN | {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"beta_fast": 64.0, "beta_slow": 2.0, "attention_factor": 1.3},
    YARN | {"truncate": False, "original_max_position_embeddings": 100},
    YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 6},
    {"rope_type": "proportional"},
    {"rope_type": "proportional", "factor": 8.0},
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("partial", [None, 0.5])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("scaling", GIVEN, ids=str)
def test_they_are_those_of_transformers(scaling, head_dim, partial, theta):
    given = scaling | {"rope_theta": theta} | ({"partial_rotary_factor": partial} if partial else {})
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=1 << 20, rope_parameters=given)
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = Rope(theta, int(head_dim * partial) if partial else None, scaling=scaling)
    # transformers computes in float32; where Llama 3 mixes, that cancels a digit.
    rtol = 2e-6 if scaling["rope_type"] == "llama3" else 1e-6
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), expected.double(), rtol=rtol, atol=0)


def test_every_type_of_transformers_is_served_or_refused():
    assert set(SCALINGS) | LENGTH_DEPENDENT == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, *GIVEN[:4]], ids=str)
def test_the_spec_of_a_model_gives_its_frequencies(scaling):
    model = build(rope_parameters=scaling | {"rope_theta": 10_000.0})
    spec = spec_of(model)
    expected = model.model.rotary_emb.inv_freq.double()
    np.testing.assert_allclose(inverse_frequencies(spec.rope, spec.head_dim), expected, rtol=1e-6, atol=0)


def test_keys_of_a_model_move_by_the_pure_rotation():
    """YaRN's attention factor is in the keys before and behind the move."""
    model = build(rope_parameters=YARN | {"rope_theta": 10_000.0, "original_max_position_embeddings": 64})
    spec, rotary = spec_of(model), model.model.rotary_emb
    x = torch.randn(1, 2, 5, spec.head_dim, generator=torch.Generator().manual_seed(0))
    rotated = transformers.models.llama.modeling_llama.apply_rotary_pos_emb

    def keys(begin):
        return rotated(x, x, *rotary(x, torch.arange(begin, begin + 5)[None]))[1][0].numpy()

    assert rotary.attention_scaling > 1.1
    moved = rotate(keys(10), 700, inverse_frequencies(spec.rope, spec.head_dim))
    np.testing.assert_allclose(moved, keys(710), atol=2e-4)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [{}, LLAMA3, YARN, {"rope_type": "proportional"}], ids=str)
@given(
    shift=st.integers(-200_000, 200_000),
    rotary_dims=st.sampled_from([None, 8, 24]),
    theta=st.sampled_from([10_000.0, 500_000.0]),
    seed=st.integers(0, 1000),
)
def test_a_query_turned_back_attends_as_to_moved_keys(layout, scaling, shift, rotary_dims, theta, seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, n, 32)).astype(np.float32) for heads, n in ((4, 3), (2, 40), (2, 40)))
    frequencies = inverse_frequencies(Rope(theta, rotary_dims, layout, scaling), 32)
    expected, lse_expected = attention(q, rotate(k, shift, frequencies, layout), v, 32**-0.5)
    got, lse = attention(rotate(q, -shift, frequencies, layout), k, v, 32**-0.5)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(lse, lse_expected, atol=1e-5)


@given(shift=st.integers(-(2**40), 2**40))
def test_angles_are_exact_at_any_distance(shift):
    frequencies = inverse_frequencies(Rope(10_000.0), 16)
    cos, sin = angles(frequencies, shift)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (8,)
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
    np.testing.assert_array_equal(cos, np.cos(shift * frequencies).astype(np.float32))


def test_angles_of_several_shifts_are_rows():
    frequencies = inverse_frequencies(Rope(10_000.0), 16)
    cos, sin = angles(frequencies, np.array([0, -7, 12_345]))
    for row, shift in enumerate((0, -7, 12_345)):
        np.testing.assert_array_equal((cos[row], sin[row]), angles(frequencies, shift))


def test_angles_move_keys():
    frequencies = inverse_frequencies(Rope(10_000.0), 16)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    cos, sin = angles(frequencies, 321)
    moved = np.concatenate([x[:, :8] * cos - x[:, 8:] * sin, x[:, 8:] * cos + x[:, :8] * sin], axis=1)
    np.testing.assert_allclose(moved, rotate(x, 321, frequencies), atol=1e-6)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (None, "a chunk can only be moved where keys are rotated"),
        (Rope(scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' depend on the length"),
        (Rope(scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}), "'longrope' depend on the length"),
        (Rope(scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' depend on the length"),
        (Rope(scaling={"rope_type": "axial"}), "'axial' is not known"),
        (Rope(scaling={"rope_type": ["yarn"]}), "is not known"),
        (Rope(scaling={"no_rope_layers": [1, 1, 0]}), "no_rope_layers"),
        (Rope(scaling={"rope_type": "linear"}), "factor is None"),
        (Rope(scaling={"rope_type": "linear", "factor": -1.0}), "factor is -1.0"),
        (Rope(scaling={"rope_type": "linear", "factor": True}), "factor is True"),
        (Rope(scaling={"rope_type": "linear", "factor": float("nan")}), "factor is nan"),
        (Rope(scaling={"rope_type": "linear", "factor": 1e-320}), "give no frequencies"),
        (Rope(scaling={"rope_type": "llama3", "factor": 8.0}), "original_max_position_embeddings is None"),
        (Rope(scaling={"rope_type": "yarn", "factor": "4"}), "factor is '4'"),
        (Rope(1.0, scaling=YARN), "theta 1"),
    ],
)
def test_what_cannot_be_moved_is_refused(rope, words):
    with pytest.raises(Unsupported, match=words):
        inverse_frequencies(rope, 64)
