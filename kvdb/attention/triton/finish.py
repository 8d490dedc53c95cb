"""The end of a decode step on the device: partial answers become one, and what the host wants to know later is noted."""

import torch
import triton
import triton.language as tl

STATE_INTS = 5
"""int32 in a state's row: where its output, its lse, its missed mass, the bound on that and its counts begin."""
SUMS = 4
"""float32 in a sequence's row of sums: tokens that searches attended, over the KV heads; the missed share of the mass and its
bound, over the query heads; the largest bound."""
NEVER = (1 << 31) - 1


@triton.jit
def _log_sum(a, b):
    """log(exp(a) + exp(b)), where either may be infinite."""
    high = tl.maximum(a, b)
    apart = tl.where(a == b, 0.0, tl.minimum(a, b)) - tl.where(a == b, 0.0, high)  # equal ones may both be infinite
    return high + tl.log(1.0 + tl.exp(apart))


@triton.jit
def _share(missed, lse):
    """The share of the whole mass that `missed` is, both as logarithms; 1 where it may be anything."""
    share = 1.0 / (1.0 + tl.exp(lse - missed))
    return tl.where(missed == float("-inf"), 0.0, tl.where(missed == float("inf"), 1.0, share))


@triton.jit
def _finite(x):
    """Whether all numbers are, as 1 or 0."""
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 0)


@triton.jit
def _finish_kernel(
    flat, states, firsts, q, kv, out, tails, rows, first_bad, sums, sums_bits,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROW: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_DIM
    begin = tl.load(firsts + sequence)
    end = tl.load(firsts + sequence + 1)
    lse = tl.load(flat + tl.load(states + begin * ROW + 1) + head)
    for state in range(begin + 1, end):
        lse = _log_sum(lse, tl.load(flat + tl.load(states + state * ROW + 1) + head))
    base = tl.where(lse == float("-inf"), 0.0, lse)
    acc = tl.zeros([DIMS], tl.float32)
    missed = tl.full([], float("-inf"), tl.float32)
    bound = missed
    attended = tl.full([], 0.0, tl.float32)
    for state in range(begin, end):
        row = states + state * ROW
        weight = tl.exp(tl.load(flat + tl.load(row + 1) + head) - base)
        acc += weight * tl.load(flat + tl.load(row) + head * HEAD_DIM + dim, mask=real, other=0.0)
        if state > begin:  # the first is exact
            missed = _log_sum(missed, tl.load(flat + tl.load(row + 2) + head))
            bound = _log_sum(bound, tl.load(flat + tl.load(row + 3) + head))
            counted = head < KV_HEADS
            attended += tl.load(flat + tl.load(row + 4) + tl.where(counted, head, 0), mask=counted, other=0.0)
    answer = acc.to(out.dtype.element_ty)
    tl.store(out + (sequence * Q_HEADS + head) * HEAD_DIM + dim, answer, mask=real)
    noted = tl.load(rows + sequence)
    if end > begin + 1:
        most = _share(bound, lse)
        tl.atomic_add(sums + noted * SUMS, attended)
        tl.atomic_add(sums + noted * SUMS + 1, _share(missed, lse))
        tl.atomic_add(sums + noted * SUMS + 2, most)
        tl.atomic_max(sums_bits + noted * SUMS + 3, most.to(tl.int32, bitcast=True))  # none is below 0: ordered as integers are

    query = q + (sequence * Q_HEADS + head) * HEAD_DIM + dim
    fine = _finite(tl.where(real, answer.to(tl.float32), 0.0)) & _finite(tl.load(query, mask=real, other=0.0))
    if head < KV_HEADS:
        key = kv + (sequence * 2 * KV_HEADS + head) * HEAD_DIM + dim
        value = key + KV_HEADS * HEAD_DIM
        fine = fine & _finite(tl.load(key, mask=real, other=0.0)) & _finite(tl.load(value, mask=real, other=0.0))
    if fine == 0:
        tl.atomic_min(first_bad + noted, tl.load(tails + sequence))


def finish(
    flat: torch.Tensor,
    states: torch.Tensor,
    firsts: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    tails: torch.Tensor,
    rows: torch.Tensor,
    first_bad: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Merge the states of each sequence into its answer, and note what the step was.

    flat: float32, where all states lie. states: int32 `[states, STATE_INTS]`, where each begins in it: outputs `[q_heads,
    head_dim]`; lse, the logarithm of what was missed and of its bound, `[q_heads]` each; how many tokens were attended,
    `[kv_heads]`. firsts: int32 `[sequences + 1]`, the first state of each sequence, which is exact and misses nothing. q, out:
    `[sequences, q_heads, head_dim]`, of any float dtype; kv: `[sequences, 2, kv_heads, head_dim]`, the step's keys and values.
    tails: int32 `[sequences]`. All contiguous, on one device; nothing waits for the host.

    rows: int32 `[sequences]`, each sequence's row in what is noted. first_bad: int32 `[rows]`, becomes the least `tails` of a
    step whose queries, keys, values or answer were not all finite; NEVER at first. sums: float32 `[rows, SUMS]`, is added to.
    """
    sequences, q_heads, head_dim = out.shape
    _finish_kernel[(sequences, q_heads)](
        flat, states, firsts, q, kv, out, tails, rows, first_bad, sums, sums.view(torch.int32),
        Q_HEADS=q_heads, KV_HEADS=kv.shape[2], HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), ROW=STATE_INTS,
        SUMS=SUMS,
    )  # fmt: skip
