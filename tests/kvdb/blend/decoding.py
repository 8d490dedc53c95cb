"""Decoding behind what was laid out."""

from tests.kvdb.blend.oracle import TOLERANCE, Text
from tests.reference import relative_error


def decode(session, oracle, steps=(1, 5, 40, 1), seed=77):
    """Every layer takes new tokens, and each answer is the oracle's."""
    spec = session.spec
    fresh = Text(spec, sum(steps), seed)
    for layer in range(spec.layers):
        at = 0
        for n in steps:
            q, k, v = (x[layer][:, at : at + n] for x in (fresh.q, fresh.k, fresh.v))
            oracle.append(layer, k, v)
            out = session.attend(layer, q, k, v, start=oracle.length(layer) - n)
            assert out.dtype == spec.numpy_dtype
            assert relative_error(out, oracle.attention(layer, q)) <= TOLERANCE[spec.dtype]
            at += n
        assert relative_error(session.attention(layer, q), oracle.attention(layer, q)) <= TOLERANCE[spec.dtype]
