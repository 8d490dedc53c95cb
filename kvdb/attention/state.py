"""The state with which every place that holds tokens answers a query, and the one merge of states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdb.errors import NonFiniteError
from kvdb.types import Array, Float32


@dataclass(frozen=True)
class AttentionState:
    """Softmax attention over some set of tokens.

    out: `[q_heads, n, value_dim]`, normalised over that set. lse: float32 `[q_heads, n]`, the natural logarithm of the sum of
    exp(scale * q.k) over it; minus infinity, with out zero, for an empty set.
    """

    out: Array
    lse: Array


def merge(states: Sequence[AttentionState]) -> AttentionState:
    """Attention over the union of disjoint token sets, from the attention over each.

    FlashAttention's rescaling (arXiv 2205.14135). Associative and commutative up to rounding; computed in float32, and the
    output is float32. At least one state.
    """
    lse = np.stack([state.lse for state in states]).astype(np.float32)
    top = lse.max(axis=0)
    weights = np.exp(lse - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=0)
    shares = weights / np.where(total > 0, total, 1)
    out = sum(share[..., None] * state.out.astype(np.float32) for share, state in zip(shares, states, strict=True))
    with np.errstate(divide="ignore"):
        return AttentionState(np.asarray(out, np.float32), top + np.log(np.where(total > 0, total, 1), dtype=np.float32))


def with_sinks(state: AttentionState, sinks: Float32) -> AttentionState:
    """The state with one more logit for each query head, float32 `[q_heads]`, which weighs in the softmax and has no value; -inf
    for none. The output is float32."""
    lse = np.logaddexp(state.lse.astype(np.float32), sinks[:, None])
    share = np.exp(state.lse - np.where(np.isfinite(lse), lse, 0))
    return AttentionState(state.out.astype(np.float32) * share[..., None], lse)


def check_finite(lse: Array, out_finite: bool) -> None:
    """Raises NonFiniteError where float32 could not hold a score or a sum of an answer, in which every query sees some token.

    lse: float32, as in AttentionState. out_finite: whether the output holds neither NaN nor infinity.
    """
    if not out_finite or not np.isfinite(lse).all():
        raise beyond_float32()


def beyond_float32() -> NonFiniteError:
    """The error of an answer that float32 could not hold."""
    return NonFiniteError(
        "the attention of finite keys, values and queries is beyond float32: a q.k, or a sum of weighted values, is larger "
        "than 3.4e38; scale them down, or find where the model produced numbers so large"
    )
