"""The keys and answers of a session that was laid out, in float64: a list of keys for each layer, at their true positions."""

from dataclasses import dataclass

import numpy as np

import kvdb
from kvdb.blend.rope import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1}
ROPES = {
    "half": kvdb.Rope(),
    "interleaved": kvdb.Rope(layout="interleaved"),
    "some dimensions": kvdb.Rope(rotary_dims=8),
    "llama3": kvdb.Rope(5e5, scaling=LLAMA3),
    "yarn": kvdb.Rope(scaling=YARN),
    "yarn, interleaved": kvdb.Rope(rotary_dims=8, layout="interleaved", scaling=YARN),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(eq=False)
class Text:
    """Tokens with random keys, values and queries, `[layers, heads, n, head_dim]`, computed from position `base` on."""

    spec: kvdb.ModelSpec
    n: int
    seed: int = 0
    base: int = 0
    first: int = 0
    sharp: float = 1.0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed + 1000)
        self.tokens = (rng.integers(0, 1000, self.n) + self.first).astype(np.int32)
        self.k, self.v, self.q = (
            self._random(rng, heads) for heads in (self.spec.kv_heads, self.spec.kv_heads, self.spec.q_heads)
        )
        self.q = (self.q.astype(np.float64) * self.sharp).astype(self.spec.numpy_dtype)

    def _random(self, rng, heads):
        return rng.standard_normal((self.spec.layers, heads, self.n, self.spec.head_dim)).astype(self.spec.numpy_dtype)

    def begin_like(self, other, n):
        """The same text, but for its first n tokens, which are the other's."""
        self.tokens[:n] = other.tokens[:n]
        for own, others in ((self.k, other.k), (self.v, other.v), (self.q, other.q)):
            own[:, :, :n] = others[:, :, :n]
        return self

    @property
    def pairs(self):
        return list(zip(self.k, self.v, strict=True))

    def store(self, db, name):
        return db.import_chunk(self.spec, self.tokens, self.pairs, name=name, base=self.base)


def make_texts(spec):
    sizes = {"a": (130, 0), "b": (70, 13), "c": (64, 5000), "d": (3, 64)}
    return {name: Text(spec, n, seed, base) for seed, (name, (n, base)) in enumerate(sizes.items())}


def moved(spec, k, shift):
    """Keys `[..., head_dim]` rotated by so many positions, float64."""
    frequencies = inverse_frequencies(spec.rope, spec.head_dim)
    pairs = len(frequencies)
    one = np.arange(0, 2 * pairs, 2) if spec.rope.layout == "interleaved" else np.arange(pairs)
    other = one + (1 if spec.rope.layout == "interleaved" else pairs)
    out = k.astype(np.float64)
    x, y = out[..., one], out[..., other]
    out[..., one] = x * np.cos(shift * frequencies) - y * np.sin(shift * frequencies)
    out[..., other] = x * np.sin(shift * frequencies) + y * np.cos(shift * frequencies)
    return out


class Oracle:
    """`keys[layer]`, `values[layer]`: float64 `[kv_heads, n, head_dim]` by position, NaN where nothing is."""

    def __init__(self, spec, parts=()):
        """parts: (text, visible) for chunks, and numbers of tokens for gaps."""
        self.spec = spec
        shape = spec.layers, spec.kv_heads, 0, spec.head_dim
        self.keys, self.values = list(np.zeros(shape)), list(np.zeros(shape))
        for part in parts:
            text, visible = part if isinstance(part, tuple) else (None, part)
            for layer in range(spec.layers):
                nothing = np.full((spec.kv_heads, visible, spec.head_dim), np.nan)
                if text is None:
                    k, v = nothing, nothing
                else:
                    k = moved(spec, text.k[layer][:, :visible], self.keys[layer].shape[1] - text.base)
                    v = text.v[layer][:, :visible]
                self.append(layer, k, v)
        self.start = self.keys[0].shape[1]

    def append(self, layer, k, v):
        self.keys[layer] = np.concatenate([self.keys[layer], k.astype(np.float64)], axis=1)
        self.values[layer] = np.concatenate([self.values[layer], v.astype(np.float64)], axis=1)

    def overlay(self, layer, positions, k, v):
        for mine, fresh in ((self.keys, k), (self.values, v)):
            mine[layer] = mine[layer].copy()
            mine[layer][:, positions] = fresh.astype(np.float64)

    def copy(self):
        twin = Oracle(self.spec)
        twin.keys, twin.values, twin.start = list(self.keys), list(self.values), self.start
        return twin

    def length(self, layer):
        return self.keys[layer].shape[1]

    def logits(self, layer, q, positions):
        """`[q_heads, n, length]`, -inf behind each query's position."""
        keys = self.keys[layer].repeat(self.spec.q_heads // self.spec.kv_heads, axis=0)
        logits = self.spec.softmax_scale * np.einsum("hnd,htd->hnt", q.astype(np.float64), keys)
        return np.where(np.arange(keys.shape[1]) <= np.asarray(positions)[:, None], logits, -np.inf)

    def output(self, layer, logits):
        values = np.nan_to_num(self.values[layer]).repeat(self.spec.q_heads // self.spec.kv_heads, axis=0)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.einsum("hnt,htd->hnd", weights / weights.sum(axis=-1, keepdims=True), values)

    def attention(self, layer, q, positions=None):
        """Attention of queries at these positions, or of the last tokens."""
        if positions is None:
            positions = np.arange(self.length(layer) - q.shape[1], self.length(layer))
        return self.output(layer, self.logits(layer, q, positions))
