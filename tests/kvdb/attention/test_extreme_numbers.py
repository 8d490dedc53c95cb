"""Finite numbers of any size: the answer is near that of float64, or it is refused; never NaN, never wrong in silence."""

import numpy as np
import pytest

import kvdb
from indexes.registry import KINDS
from kvdb.config import Config, IndexConfig, OptimizerConfig
from kvdb.errors import NonFiniteError

TOKENS, HEAD_DIM = 1500, 64
CONFIG = Config(optimizer=OptimizerConfig(short_context_tokens=64), indexes=IndexConfig(automatic=False, segment_tokens_min=64))


class Layer:
    """A layer of keys, values and queries of the given sizes, in a database with the named indexes."""

    def __init__(self, k=1.0, q=1.0, v=1.0, dtype="float32", kinds=()):
        rng = np.random.default_rng(0)
        self.spec = kvdb.ModelSpec("m", layers=1, q_heads=4, kv_heads=2, head_dim=HEAD_DIM, dtype=dtype)
        made = self.spec.numpy_dtype
        self.k = (k * rng.standard_normal((2, TOKENS, HEAD_DIM))).astype(made)
        self.v = (v * rng.standard_normal((2, TOKENS, HEAD_DIM))).astype(made)
        self.q = (q * rng.standard_normal((4, 1, HEAD_DIM))).astype(made)
        self.db = kvdb.connect(config=CONFIG)
        self.db.import_context(self.spec, np.arange(TOKENS), [(self.k, self.v)], name="a")
        for kind in kinds:
            self.db.build_index("a", kind)
        self.session = self.db.create_session(self.spec, np.arange(TOKENS))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.db.close()

    def error(self, out):
        """Relative, of the head that is farthest from attention in float64."""
        worst = 0.0
        for head in range(4):
            logits = self.k[head // 2].astype(np.float64) @ self.q[head, 0].astype(np.float64) * self.spec.softmax_scale
            weights = np.exp(logits - logits.max())
            want = weights @ self.v[head // 2].astype(np.float64) / weights.sum()
            worst = max(worst, np.linalg.norm(np.asarray(out[head, 0], np.float64) - want) / np.linalg.norm(want))
        return worst


@pytest.mark.parametrize("sizes", [{"k": 1e19, "q": 1e20}, {"v": 5e37}], ids=["scores", "sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_float32_cannot_hold_is_refused(sizes, dtype):
    with Layer(**sizes, dtype=dtype) as layer, pytest.raises(NonFiniteError, match="beyond float32"):
        layer.session.attention(0, layer.q)


def test_one_session_of_a_batch_whose_answer_float32_cannot_hold_is_refused():
    with Layer(k=1e19, q=1e20) as layer, pytest.raises(NonFiniteError, match="beyond float32"):
        layer.db.attention([layer.session, layer.session.fork()], 0, np.stack([layer.q, layer.q]))


@pytest.mark.parametrize(
    "sizes", [{"k": 1e19}, {"k": 5e37, "q": 1e-38}, {"k": 1e-20, "q": 1e20}, {"k": 1e-40}, {"v": 1e36}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_over_numbers_of_any_size_answers_or_says_what_it_missed(kind, sizes):
    with Layer(**sizes, kinds=[kind]) as layer:
        for retrieval in (kvdb.Dipr(1e-6), kvdb.TopK(10), kvdb.TopP(0.9)):
            session = layer.session.fork()
            error = layer.error(session.attention(0, layer.q, retrieval=retrieval, hints=kvdb.Hints(index=kind)))
            assert error < 0.05 or session.stats().missed_mass_bound_max > 0.02
            bounded = layer.session.fork()
            out = bounded.attention(0, layer.q, max_missed_mass=0.01, hints=kvdb.Hints(index=kind))
            assert layer.error(out) < 0.05


@pytest.mark.parametrize("length", [0.3, 20, 60, 100, 400])
def test_estimates_of_the_tail_are_finite_however_far_apart_logits_lie(length):
    with Layer(q=length / 8, kinds=["coarse-clusters"]) as layer:
        for retrieval in (kvdb.TopK(64), kvdb.Dipr(), kvdb.TopP(0.9)):
            out = layer.session.attention(
                0, layer.q, retrieval=retrieval, estimate_tail=True, hints=kvdb.Hints(index="coarse-clusters")
            )
            assert np.isfinite(out).all()


@pytest.mark.parametrize("retrieval", [kvdb.TopK(64), kvdb.Dipr(), kvdb.TopP(0.9)], ids=str)
def test_an_estimate_that_float32_cannot_hold_is_refused(retrieval):
    with Layer(k=1e19, q=3e18, kinds=["coarse-clusters"]) as layer:
        try:
            out = layer.session.attention(
                0, layer.q, retrieval=retrieval, estimate_tail=True, hints=kvdb.Hints(index="coarse-clusters")
            )
        except NonFiniteError:
            return
        assert layer.error(out) < 0.05
