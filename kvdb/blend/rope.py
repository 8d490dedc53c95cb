"""The frequencies that a model rotates its keys with, and the angles that move such keys.

Keys can be moved only if the frequencies of their RoPE depend on nothing but the model: a key computed at position p and turned
by the angles of `shift` is then the key of position p + shift (RoFormer, arXiv 2104.09864, equation 16). A factor by which a
model multiplies cosines and sines, such as YaRN's attention factor, is in the keys already and no part of the move.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import indexes.rotation as rotation
from kvdb.errors import Unsupported
from kvdb.types import Float32, Rope

Float64: TypeAlias = npt.NDArray[np.float64]

SERVED = (
    "kvdb moves chunks under RoPE of type default, linear, llama3, proportional and yarn; import the text as a context instead"
)


OWN_FREQUENCIES = "inv_freq"
"""The name in Rope.scaling of frequencies that the model itself states, because its parameters would give other ones."""


def inverse_frequencies(rope: Rope | None, head_dim: int) -> Float64:
    """The radians per position of each rotated pair, float64 `[pairs]`, as transformers.modeling_rope_utils computes them.

    pairs is half of rotary_dims, or of head_dim where that is None. RoPE of type "proportional" pairs all of head_dim, whatever
    rotary_dims is; pairs behind rotary_dims have the frequency 0. Raises Unsupported where keys cannot be moved: no RoPE,
    frequencies that depend on the length (dynamic, longrope), layers that do not rotate or rotate by several RoPEs, or a type or
    parameters that kvdb does not know.
    """
    if rope is None:
        raise Unsupported("the model rotates no keys (ModelSpec.rope is None); a chunk can only be moved where keys are rotated")
    parameters = dict(rope.scaling)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if parameters.get("no_rope_layers") is not None:
        raise Unsupported(f"some layers rotate no keys (no_rope_layers); a chunk can only be moved where all do. {SERVED}")
    if parameters.get("rope_kinds") is not None:
        raise Unsupported(
            f"the layers rotate by several RoPEs (rope_kinds); a chunk can only be moved where all are alike. {SERVED}"
        )
    if kind in LENGTH_DEPENDENT:
        raise Unsupported(f"the frequencies of RoPE of type {kind!r} depend on the length, so a key cannot be moved. {SERVED}")
    if OWN_FREQUENCIES in parameters:
        return _own(parameters[OWN_FREQUENCIES], head_dim)
    scale = SCALINGS.get(kind)
    if scale is None:
        raise Unsupported(f"RoPE of type {kind!r} is not known. {SERVED}")
    given = _Given(rope.theta, head_dim if rope.rotary_dims is None else rope.rotary_dims, head_dim, parameters)
    with np.errstate(all="ignore"):
        frequencies = scale(given)
    if not np.isfinite(frequencies).all():
        raise Unsupported(f"the parameters of RoPE of type {kind!r} give no frequencies: {parameters}. {SERVED}")
    return frequencies


def angles(frequencies: Float64, shift: int | npt.NDArray[np.int64]) -> tuple[Float32, Float32]:
    """The cosines and sines that move keys by `shift` positions, float32 `[pairs]`, computed in float64.

    An array of shifts `[views]` gives `[views, pairs]`.
    """
    turned = np.multiply.outer(np.asarray(shift, np.float64), frequencies)
    return np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)


def _own(frequencies: Any, head_dim: int) -> Float64:
    """The frequencies that a model itself states. Raises Unsupported for values that cannot be frequencies."""
    own = np.asarray(frequencies, np.float64)
    if own.ndim != 1 or not 0 < len(own) <= head_dim // 2 or not np.isfinite(own).all():
        raise Unsupported(
            f"{OWN_FREQUENCIES} of Rope.scaling is {frequencies!r}; expected a number for each of up to {head_dim // 2} pairs"
        )
    return own


@dataclass(frozen=True)
class _Given:
    """The numbers that a scaling is computed from. dims: how many of head_dim's dimensions are rotated."""

    theta: float
    dims: int
    head_dim: int
    parameters: Mapping[str, Any]

    @property
    def unscaled(self) -> Float64:
        return rotation.inverse_frequencies(self.theta, self.dims)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive parameter; the default where it is absent or 0. Raises Unsupported."""
        value = self.parameters.get(name) or default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise Unsupported(f"the RoPE parameter {name} is {self.parameters.get(name)!r}; expected a positive number. {SERVED}")
        return float(value)


def _proportional(given: _Given) -> Float64:
    """The first pairs turn as they would if all of head_dim turned; the others do not turn."""
    frequencies = rotation.inverse_frequencies(given.theta, given.head_dim)
    frequencies[given.dims // 2 :] = 0
    return frequencies / given.number("factor", 1.0)


def _llama3(given: _Given) -> Float64:
    """Long wavelengths are stretched by `factor`, short ones stay, and those between are interpolated (Llama 3.1)."""
    factor, trained = given.number("factor"), given.number("original_max_position_embeddings")
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    frequencies = given.unscaled
    wavelengths = 2 * math.pi / frequencies
    kept = (trained / wavelengths - low) / (high - low)
    mixed = (1 - kept) * frequencies / factor + kept * frequencies
    unless_long = np.where(wavelengths < trained / high, frequencies, mixed)
    return np.where(wavelengths > trained / low, frequencies / factor, unless_long)


def _yarn(given: _Given) -> Float64:
    """Pairs that turn often within the trained length stay, those that turn seldom are stretched, and between them lies a ramp.

    YaRN, arXiv 2309.00071, section 3.2.
    """
    factor, trained = given.number("factor"), given.number("original_max_position_embeddings")
    if given.theta == 1:
        raise Unsupported(f"RoPE of type 'yarn' has theta 1, with which all pairs turn alike; expected another. {SERVED}")

    def pair(turns: float) -> float:
        """The number of the pair that makes `turns` turns within the trained length, a fraction."""
        return given.dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(given.theta))

    begin, end = pair(given.number("beta_fast", 32.0)), pair(given.number("beta_slow", 1.0))
    if given.parameters.get("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, given.dims - 1)
    width = 0.001 if begin == end else end - begin
    stretched = np.clip((np.arange(given.dims // 2) - begin) / width, 0, 1)
    frequencies: Float64 = given.unscaled / factor * stretched + given.unscaled * (1 - stretched)
    return frequencies


SCALINGS: Mapping[str, Callable[[_Given], Float64]] = {
    "default": lambda given: given.unscaled,
    "linear": lambda given: given.unscaled / given.number("factor"),
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
}
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
