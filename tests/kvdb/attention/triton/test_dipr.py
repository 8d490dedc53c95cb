"""DIPR: everything within the range is found, what is not is accounted for, and attention is over what was found."""

import math

import pytest
import torch

from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.pages import Runs
from kvdb.attention.triton.workspace import DiprWorkspace
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout
from tests.kvdb.attention.triton.reference import TOLERANCE, error
from tests.kvdb.attention.triton.sequences import Sequences, nan, queries

KV_HEADS, GROUP = 2, 3
Q_HEADS = KV_HEADS * GROUP


class Answer:
    """One call, with outputs and workspace poisoned before."""

    def __init__(self, sequences, q, beta, floor=None, capacity=None, scale=None):
        count, _, head_dim = q.shape
        self.scale = scale or head_dim**-0.5
        self.floor = torch.full((count, Q_HEADS), -torch.inf) if floor is None else floor
        self.workspace = DiprWorkspace.of(sequences.pages.layout, count, Q_HEADS, sequences.runs.tokens_max, q.device, capacity)
        for x in (self.workspace.best, self.workspace.records, self.workspace.sums, self.workspace.partials.out):
            x.fill_(torch.nan)
        self.workspace.selection.ids.fill_(-1)
        self.out, self.lse, self.top = nan(*q.shape), nan(count, Q_HEADS), nan(count, Q_HEADS)
        self.selection = dipr(
            q, sequences.pages, sequences.runs, self.scale, beta, self.floor, self.workspace, self.out, self.lse, self.top
        )

    def ids(self, sequence, kv_head):
        return sorted(self.selection.ids[sequence, kv_head, : self.selection.counts[sequence, kv_head]].tolist())


def check(sequences, q, beta, answer, tolerance=1e-5):
    """Against dense scores in float64."""
    for s, length in enumerate(sequences.lengths):
        scores = sequences.scores(q[s], s)
        largest = torch.cat([scores, answer.floor[s].double()[:, None]], 1).amax(1)
        wanted = scores >= largest[:, None] - beta
        read = torch.zeros(Q_HEADS, length, dtype=torch.bool)
        for head in range(KV_HEADS):
            rows = slice(head * GROUP, (head + 1) * GROUP)
            ids = answer.ids(s, head)
            assert len(set(ids)) == len(ids)
            assert set(wanted[rows].any(0).nonzero()[:, 0].tolist()) <= set(ids)
            read[rows, ids] = True
        out, lse, top = sequences.attention(q[s], s, answer.scale, read)
        if read.any():
            assert error(answer.out[s], out) < tolerance
        some = read.any(1)
        assert torch.allclose(answer.lse[s][some].double(), lse[some], atol=10 * tolerance, rtol=tolerance)
        assert torch.allclose(answer.top[s][some].double(), top[some], rtol=tolerance, atol=10 * tolerance)
        assert (answer.lse[s][~some] == -math.inf).all()
        assert (answer.out[s][~some] == 0).all()
        missed = torch.logsumexp((answer.scale * scores).masked_fill(read, -torch.inf), 1)
        assert (answer.selection.missed_bound[s] >= missed - 1e-4).all()
        assert (answer.selection.missed[s] <= answer.selection.missed_bound[s] + 1e-4).all()
        yield read, missed


@pytest.mark.parametrize(
    ("block_size", "head_dim", "lengths"),
    [(64, 32, [130, 1]), (48, 40, [48, 65]), (7, 16, [20]), (1, 8, [3, 2]), (96, 64, [200, 0])],
)
def test_everything_in_range_is_found_and_attended(block_size, head_dim, lengths):
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, head_dim, block_size), lengths)
    q = queries(len(lengths), Q_HEADS, head_dim)
    answer = Answer(sequences, q, beta=8.0, capacity=512)
    assert len(list(check(sequences, q, 8.0, answer))) == len(lengths)


@pytest.mark.parametrize("format_", SLOT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format(format_, dtype):
    sequences = Sequences.of(SlotLayout(format_, KV_HEADS, 32, 64), [70], seed=1)
    q = queries(1, Q_HEADS, 32, dtype=dtype)
    answer = Answer(sequences, q, beta=10.0, capacity=256)
    assert len(list(check(sequences, q, 10.0, answer, TOLERANCE[format_]))) == 1


def test_few_more_than_wanted_are_read_and_the_estimate_is_near():
    n, head_dim, beta = 1000, 64, 40.0
    q = queries(1, Q_HEADS, head_dim, length=2.0)
    k = torch.randn(KV_HEADS, n, head_dim, generator=torch.Generator().manual_seed(1))
    for row in range(Q_HEADS):
        planted = slice(100 + 100 * row, 200 + 100 * row, 5)
        k[row // GROUP, planted] += q[0, row] / q[0, row].norm() * torch.linspace(5, 9, 20)[:, None]
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, head_dim, 64), [n], k=[k])
    answer = Answer(sequences, q, beta)
    ((read, missed),) = check(sequences, q, beta, answer)
    scores = sequences.scores(q[0], 0)
    wanted = (scores >= scores.amax(1, keepdim=True) - beta).unflatten(0, (KV_HEADS, GROUP)).any(1).sum()
    assert 10 < wanted <= read[::GROUP].sum() <= 2 * wanted
    assert ((answer.selection.missed[0] - missed).abs() < 0.4).all()
    assert ((answer.selection.missed_bound[0] - missed) < 3).all()


def test_the_largest_may_have_been_seen_elsewhere():
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 32, 64), [300], seed=3)
    q = queries(1, Q_HEADS, 32)
    floor = sequences.scores(q[0], 0).amax(1)[None].float() + torch.tensor([[0.0, 15.0, 1e4, 1e4, 1e4, 1e4]])
    answer = Answer(sequences, q, 10.0, floor)
    ((read, missed),) = check(sequences, q, 10.0, answer)
    assert not read[GROUP:].any()
    assert torch.allclose(answer.selection.missed[0, : GROUP - 1].double(), missed[: GROUP - 1], atol=0.3)


def test_who_wants_more_than_the_capacity_reads_everything():
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 32, 64), [300, 130], seed=4)
    q = queries(2, Q_HEADS, 32)
    q[0, :GROUP] *= 0.01
    answer = Answer(sequences, q, 5.0, capacity=100)
    assert answer.selection.counts[0, 0] == 300
    assert (answer.selection.counts.flatten()[1:] <= 100).all()
    out, lse, top = sequences.attention(q[0], 0, answer.scale)
    assert error(answer.out[0, :GROUP], out[:GROUP]) < 1e-5
    assert torch.allclose(answer.lse[0, :GROUP].double(), lse[:GROUP], atol=1e-5)
    assert torch.allclose(answer.top[0, :GROUP].double(), top[:GROUP], atol=1e-5)
    assert (answer.selection.missed_bound[0, :GROUP] == -torch.inf).all()
    assert (answer.selection.missed_bound[0, GROUP:] > -torch.inf).all()


def test_a_workspace_is_used_again_and_again():
    sequences = Sequences.of(SlotLayout("bfloat16", KV_HEADS, 32, 16), [50, 40], seed=5)
    q = queries(2, Q_HEADS, 32)
    answer = Answer(sequences, q, 10.0, capacity=128)
    first = [answer.ids(s, h) for s in range(2) for h in range(KV_HEADS)]
    lse, missed = answer.lse.clone(), answer.selection.missed_bound.clone()
    shorter = Runs(sequences.runs.table, sequences.runs.begin, sequences.runs.tokens // 2, sequences.runs.tokens_max)
    arguments = (answer.scale, 10.0, answer.floor, answer.workspace, answer.out, answer.lse, answer.top)
    dipr(q, sequences.pages, shorter, *arguments)
    assert not torch.allclose(answer.lse, lse)
    dipr(q, sequences.pages, sequences.runs, *arguments)
    assert first == [answer.ids(s, h) for s in range(2) for h in range(KV_HEADS)]
    assert torch.allclose(answer.lse, lse, atol=1e-5)
    assert torch.allclose(answer.selection.missed_bound, missed, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_queries_of_any_size(size):
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 32, 64), [100], seed=6)
    q = queries(1, Q_HEADS, 32) * size
    answer = Answer(sequences, q, 3.0 * size, capacity=100)
    assert len(list(check(sequences, q, 3.0 * size, answer))) == 1


def test_what_does_not_fit_is_refused():
    sequences = Sequences.of(SlotLayout("float32", KV_HEADS, 32, 64), [100])
    q = queries(1, Q_HEADS, 32)
    with pytest.raises(ValueError, match="q is"):
        Answer(sequences, q.repeat(2, 1, 1), 1.0)
    with pytest.raises(ValueError, match="floor is"):
        Answer(sequences, q, 1.0, floor=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="beta"):
        Answer(sequences, q, -1.0)
    workspace = DiprWorkspace.of(sequences.pages.layout, 1, Q_HEADS, 99, q.device)
    with pytest.raises(ValueError, match="the workspace is for"):
        dipr(q, sequences.pages, sequences.runs, 1.0, 1.0, torch.zeros(1, Q_HEADS), workspace, nan(*q.shape), nan(1, Q_HEADS))
