"""The end of a decode step on the device: partial answers become one, and what the host wants to know later is noted."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvdb.attention.signs import SIGN_MAX, SIGNS

STATE_INTS = 5
"""int32 in a state's row: where its output, its lse, its missed mass, the bound on that and its counts begin."""
SUMS = 4
"""float32 in a row of sums: tokens that searches attended, over the KV heads; the missed share of the mass and its bound, over
the query heads; the largest bound."""
NEVER = (1 << 31) - 1


@dataclass(frozen=True)
class States:
    """The states of each sequence of a step, in one tensor.

    flat: float32, where all of them lie. places: int32 `[states, STATE_INTS]`, where each begins in it: outputs `[q_heads,
    head_dim]`; lse, the logarithm of what was missed and of its bound, `[q_heads]` each; how many tokens were attended,
    `[kv_heads]`. firsts: int32 `[sequences + 1]`, the first state of each sequence, which is exact and misses nothing.
    """

    flat: torch.Tensor
    places: torch.Tensor
    firsts: torch.Tensor


@dataclass(frozen=True)
class Rereading:
    """What is read anew where searches missed too much.

    whole: one state of each sequence, over everything. guards: float32 `[sequences, kv_heads]`, the logarithm of the mass that a
    KV head may be estimated to miss, relative to the mass it reads. ranges: float32 `[sequences, 2, SIGNS, q_heads]`, the least
    and the largest of each sign (`kvdb.attention.signs`), of which the largest score is not looked at. bounds: float32
    `[sequences]`, the share of the mass that any head may be bounded to miss. All infinite for no limit. needed: int32
    `[sequences]`, 1 where a limit was passed. any_needed: int32 `[1]`. tokens: int32 `[sequences]`, that are searched.
    """

    whole: States
    guards: torch.Tensor
    ranges: torch.Tensor
    bounds: torch.Tensor
    needed: torch.Tensor
    any_needed: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class NoteRows:
    """Where steps are noted. rows: int32 `[sequences]`, each sequence's row. first_bad: int32 `[all rows]`, becomes the least
    `tails` of a step whose queries, keys, values or answer were not all finite; NEVER at first. sums: float32 `[all rows, SUMS]`,
    is added to."""

    rows: torch.Tensor
    first_bad: torch.Tensor
    sums: torch.Tensor


@triton.jit
def _log_sum(a, b):
    """log(exp(a) + exp(b)), where either may be infinite."""
    high = tl.maximum(a, b)
    apart = tl.where(a == b, 0.0, tl.minimum(a, b)) - tl.where(a == b, 0.0, high)  # equal ones may both be infinite
    return high + tl.log(1.0 + tl.exp(apart))


@triton.jit
def _column(flat, places, begin, end, head, COLUMN: tl.constexpr, ROW: tl.constexpr):
    """The logarithm of the sum of one number of a head over states [begin, end), -inf for none."""
    total = tl.full([], float("-inf"), tl.float32)
    for state in range(begin, end):
        total = _log_sum(total, tl.load(flat + tl.load(places + state * ROW + COLUMN) + head))
    return total


@triton.jit
def _share(missed, lse):
    """The share of the whole mass that `missed` is, both as logarithms; 1 where it may be anything."""
    share = 1.0 / (1.0 + tl.exp(tl.where(missed == float("-inf"), 0.0, lse) - missed))
    return tl.where(missed == float("-inf"), 0.0, tl.where(missed == float("inf"), 1.0, share))


@triton.jit
def _finite(x):
    """Whether all numbers are, as 1 or 0."""
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 0)


@triton.jit
def _inside(sign, ranges, NUMBER: tl.constexpr, SIGNS: tl.constexpr, Q_HEADS: tl.constexpr, SIGN_MAX: tl.constexpr):
    """Whether a sign of a head lies in its range. What is no number counts as SIGN_MAX."""
    sign = tl.where(sign == sign, tl.minimum(tl.maximum(sign, -SIGN_MAX), SIGN_MAX), SIGN_MAX)  # noqa: PLR0124  # false for what is no number
    least = tl.load(ranges + NUMBER * Q_HEADS)
    return (sign >= least) & (sign <= tl.load(ranges + (SIGNS + NUMBER) * Q_HEADS))


@triton.jit
def _judge_kernel(flat, places, firsts, q, guards, ranges, bounds, needed, any_needed, GROUP: tl.constexpr,
                  KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROW: tl.constexpr, SIGNS: tl.constexpr,
                  SIGN_MAX: tl.constexpr):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(firsts + sequence)
    end = tl.load(firsts + sequence + 1)
    lse = _column(flat, places, begin, end, head, 1, ROW)
    missed = _column(flat, places, begin + 1, end, head, 2, ROW)
    bound = _column(flat, places, begin + 1, end, head, 3, ROW)
    guard = tl.load(guards + sequence * KV_HEADS + head // GROUP)
    few = (missed == float("-inf")) | (missed - tl.where(lse == float("-inf"), 0.0, lse) <= guard)
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    dim = tl.arange(0, DIMS)
    x = tl.load(q + (sequence * Q_HEADS + head) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    seen = ranges + sequence * 2 * SIGNS * Q_HEADS + head
    few = few & _inside(0.5 * tl.log(tl.sum(x * x, 0)), seen, 0, SIGNS, Q_HEADS, SIGN_MAX)
    few = few & _inside(lse, seen, 1, SIGNS, Q_HEADS, SIGN_MAX) & _inside(bound - lse, seen, 2, SIGNS, Q_HEADS, SIGN_MAX)
    if (few & (_share(bound, lse) <= tl.load(bounds + sequence))) == 0:
        tl.store(needed + sequence, 1)
        tl.store(any_needed, 1)


@triton.jit
def _finish_kernel(
    flat, places, firsts, q, kv, out, tails, rows, first_bad, sums, sums_bits, whole_flat, whole_places, needed, searched,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROW: tl.constexpr,
    SUMS: tl.constexpr, REREADS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_DIM
    begin = tl.load(firsts + sequence)
    end = tl.load(firsts + sequence + 1)
    counted = head < KV_HEADS
    anew = 0
    if REREADS:
        anew = tl.load(needed + sequence)
    lse = _column(flat, places, begin, end, head, 1, ROW)
    base = tl.where(lse == float("-inf"), 0.0, lse)
    acc = tl.zeros([DIMS], tl.float32)
    attended = tl.full([], 0.0, tl.float32)
    for state in range(begin, end):
        row = places + state * ROW
        weight = tl.exp(tl.load(flat + tl.load(row + 1) + head) - base)
        acc += weight * tl.load(flat + tl.load(row) + head * HEAD_DIM + dim, mask=real, other=0.0)
        if state > begin:  # the first is exact
            attended += tl.load(flat + tl.load(row + 4) + tl.where(counted, head, 0), mask=counted, other=0.0)
    missed = _share(_column(flat, places, begin + 1, end, head, 2, ROW), lse)
    bound = _share(_column(flat, places, begin + 1, end, head, 3, ROW), lse)
    if REREADS:  # noqa: SIM102  # what Triton knows, and what it does not
        if anew > 0:
            at = tl.load(whole_places + sequence * ROW) + head * HEAD_DIM
            acc = tl.load(whole_flat + at + dim, mask=real, other=0.0)
            attended = tl.where(counted, tl.load(searched + sequence).to(tl.float32), 0.0)
            missed = tl.full([], 0.0, tl.float32)
            bound = missed
    answer = acc.to(out.dtype.element_ty)
    tl.store(out + (sequence * Q_HEADS + head) * HEAD_DIM + dim, answer, mask=real)
    noted = tl.load(rows + sequence)
    if end > begin + 1:
        tl.atomic_add(sums + noted * SUMS, attended)
        tl.atomic_add(sums + noted * SUMS + 1, missed)
        tl.atomic_add(sums + noted * SUMS + 2, bound)
        tl.atomic_max(sums_bits + noted * SUMS + 3, bound.to(tl.int32, bitcast=True))  # none is below 0: ordered as integers are

    query = q + (sequence * Q_HEADS + head) * HEAD_DIM + dim
    fine = _finite(tl.where(real, answer.to(tl.float32), 0.0)) & _finite(tl.load(query, mask=real, other=0.0))
    if head < KV_HEADS:
        key = kv + (sequence * 2 * KV_HEADS + head) * HEAD_DIM + dim
        value = key + KV_HEADS * HEAD_DIM
        fine = fine & _finite(tl.load(key, mask=real, other=0.0)) & _finite(tl.load(value, mask=real, other=0.0))
    if fine == 0:
        tl.atomic_min(first_bad + noted, tl.load(tails + sequence))


def judge(states: States, anew: Rereading, q: torch.Tensor) -> None:
    """Say in `anew` where searches missed more than they may, or a query is unlike those for which its way was proven. q:
    `[sequences, q_heads, head_dim]`, contiguous. Nothing waits for the host."""
    sequences, kv_heads = anew.guards.shape
    q_heads, head_dim = q.shape[1:]
    anew.needed.zero_()
    anew.any_needed.zero_()
    _judge_kernel[(sequences, q_heads)](
        states.flat, states.places, states.firsts, q, anew.guards, anew.ranges, anew.bounds, anew.needed, anew.any_needed,
        GROUP=q_heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), ROW=STATE_INTS,
        SIGNS=SIGNS, SIGN_MAX=SIGN_MAX,
    )  # fmt: skip


def finish(
    states: States,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    tails: torch.Tensor,
    notes: NoteRows,
    anew: Rereading | None = None,
) -> None:
    """Merge the states of each sequence into its answer, and note what the step was.

    q, out: `[sequences, q_heads, head_dim]`, of any float dtype; kv: `[sequences, 2, kv_heads, head_dim]`, the step's keys and
    values. tails: int32 `[sequences]`. anew: what answers instead where `judge` found it needed, None for nothing. All are
    contiguous, on one device; nothing waits for the host.
    """
    sequences, q_heads, head_dim = out.shape
    whole = states if anew is None else anew.whole
    needed, searched = (states.firsts, states.firsts) if anew is None else (anew.needed, anew.tokens)
    _finish_kernel[(sequences, q_heads)](
        states.flat, states.places, states.firsts, q, kv, out, tails, notes.rows, notes.first_bad, notes.sums,
        notes.sums.view(torch.int32), whole.flat, whole.places, needed, searched,
        Q_HEADS=q_heads, KV_HEADS=kv.shape[2], HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), ROW=STATE_INTS,
        SUMS=SUMS, REREADS=anew is not None,
    )  # fmt: skip
