"""The oracle that every way of answering is compared with: dense attention in float64."""

import numpy as np


def attention(q, k, v, scale, new=0):
    """Attention of q `[q_heads, n, d]` over k, v `[kv_heads, N, d]`: out `[q_heads, n, d]` and lse `[q_heads, n]`, float64.

    new: n where the queries belong to the last n tokens, each of which sees none behind itself; 0 where all see everything.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group, rows = q.shape[0] // k.shape[0], q.shape[:2]
    q = q.reshape(len(k), group * rows[1], q.shape[2])
    logits = scale * (q @ k.transpose(0, 2, 1)).reshape(*rows, k.shape[1])
    if new:
        position = np.arange(k.shape[1] - new, k.shape[1])[:, None]
        logits = np.where(np.arange(k.shape[1])[None] <= position, logits, -np.inf)
    top = logits.max(axis=-1, initial=-1e300, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    shares = (weights / np.where(total > 0, total, 1)).reshape(len(k), group * rows[1], k.shape[1])
    out = (shares @ v).reshape(*rows, v.shape[2])
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[..., 0]


def relative_error(got, expected):
    """The norm of the difference, divided by the norm of `expected`."""
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(np.asarray(got).astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30)


TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-3}
"""The largest relative error of an answer, by the dtype of keys, values and output."""
