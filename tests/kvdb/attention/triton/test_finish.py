"""The end of a step: states of several searches become one answer, and what the host asks for later is noted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention.signs import SIGNS
from kvdb.attention.state import AttentionState, merge
from kvdb.attention.triton.finish import NEVER, STATE_INTS, SUMS, NoteRows, Rereading, States, finish, judge
from tests.kvdb.attention.triton.reference import DEVICE

Q_HEADS, KV_HEADS, DIM = 4, 2, 16
EMPTY = -np.inf


class Step:
    """States of some sequences as launches write them, in one tensor with gaps in between."""

    def __init__(self, rng, states):
        """states: how many each sequence has, the first of which is exact."""
        n = len(states)
        self.firsts = np.concatenate([[0], np.cumsum(states)]).astype(np.int32)
        total = self.firsts[-1]
        self.out = rng.standard_normal((total, Q_HEADS, DIM)).astype(np.float32)
        self.lse, self.missed, self.bound = (rng.normal(0, 3, (total, Q_HEADS)).astype(np.float32) for _ in range(3))
        self.counts = rng.integers(0, 50, (total, KV_HEADS)).astype(np.float32)
        self.q, self.kv = rng.standard_normal((n, Q_HEADS, DIM)), rng.standard_normal((n, 2, KV_HEADS, DIM))
        self.tails, self.rows = rng.integers(1, 99, n).astype(np.int32), rng.permutation(2 * n)[:n].astype(np.int32)
        self.first_bad = torch.full((2 * n,), NEVER, dtype=torch.int32, device=DEVICE)
        self.sums = torch.zeros((2 * n, SUMS), device=DEVICE)

    def on_device(self):
        """The states, and the rest of what a step gets."""
        places, parts, end = np.zeros((len(self.out), STATE_INTS), np.int32), [], 0
        for state in reversed(range(len(self.out))):
            for i, part in enumerate((self.out, self.lse, self.missed, self.bound, self.counts)):
                places[state, i] = end + 3
                parts += [np.full(3, np.nan, np.float32), part[state].ravel()]
                end += 3 + part[state].size
        return States(*(torch.from_numpy(np.asarray(x)).to(DEVICE) for x in (np.concatenate(parts), places, self.firsts)))

    def __call__(self, dtype=torch.float32, anew=None):
        """The answers."""
        q, kv = (torch.from_numpy(x).to(DEVICE).to(dtype) for x in (self.q, self.kv))
        out = torch.full_like(q, torch.nan)
        tails, rows = (torch.from_numpy(x).to(DEVICE) for x in (self.tails, self.rows))
        finish(self.on_device(), q, kv, out, tails, NoteRows(rows, self.first_bad, self.sums), anew)
        return out.float().cpu().numpy()

    def states(self, sequence):
        begin, end = self.firsts[sequence : sequence + 2]
        return [AttentionState(self.out[i][:, None], self.lse[i][:, None]) for i in range(begin, end)]


def shares(missed, lse):
    lse = np.where(np.isneginf(missed), 0, np.float64(lse))
    return 1 / (1 + np.exp(lse - missed))


def log_sum(logs):
    """Of each column, in float64; of none it is -inf."""
    return np.logaddexp.reduce(np.float64(logs), axis=0, initial=-np.inf)


@given(seed=st.integers(0, 1 << 30), states=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_states_are_merged_and_summed(seed, states):
    step = Step(np.random.default_rng(seed), states)
    step.lse[np.random.default_rng(seed).random(step.lse.shape) < 0.2] = EMPTY
    for times in (1, 2):
        out, sums = step(), step.sums.cpu().numpy()
        for i, row in enumerate(step.rows):
            right = merge(step.states(i))
            np.testing.assert_allclose(out[i], right.out[:, 0], atol=1e-5)
            found = slice(step.firsts[i] + 1, step.firsts[i + 1])
            missed, bound = (
                np.logaddexp.reduce(np.float64(x[found]), axis=0, initial=-np.inf) for x in (step.missed, step.bound)
            )
            expected = [step.counts[found].sum(), shares(missed, right.lse[:, 0]).sum(), shares(bound, right.lse[:, 0]).sum()]
            np.testing.assert_allclose(sums[row, :3], times * np.array(expected), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(sums[row, 3], shares(bound, right.lse[:, 0]).max(), rtol=1e-4, atol=1e-6)
    assert (step.first_bad == NEVER).all()


def test_what_may_be_anything_is_all_of_the_mass():
    step = Step(np.random.default_rng(0), [2])
    step.missed[1], step.bound[1] = -np.inf, np.inf
    step()
    assert step.sums[step.rows[0], 1:].tolist() == [0, Q_HEADS, 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "out"])
def test_the_first_step_that_is_not_finite_is_noted(bad, where):
    step = Step(np.random.default_rng(1), [1, 2, 1])
    target = {"q": step.q[1], "k": step.kv[1, 0], "v": step.kv[1, 1], "out": step.out[step.firsts[1]]}[where]
    before, target[-1, -1] = target[-1, -1], bad
    step.tails[:] = 7, 8, 9
    step()
    step.tails[:] = 8, 9, 10
    step()
    target[-1, -1] = before
    step.tails[:] = 9, 10, 11
    step()
    noted = step.first_bad.cpu().numpy()
    assert noted[step.rows].tolist() == [NEVER, 8, NEVER]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_answer_that_its_dtype_cannot_hold_is_not_finite():
    step = Step(np.random.default_rng(1), [1])
    step.out[0, 2, 5], step.lse[0] = 1e6, 0
    step(torch.float16)
    assert step.first_bad[step.rows[0]] == step.tails[0]


@pytest.mark.parametrize("limit", ["guards", "bounds", "ranges"])
@pytest.mark.parametrize(("missed", "needed"), [(EMPTY, 0), (-7.0, 0), (-3.0, 1), (np.inf, 1), (np.nan, 1)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_missed_too_much_is_answered_by_what_was_read_anew(limit, missed, needed):
    rng = np.random.default_rng(2)
    step, whole = Step(rng, [2, 1, 3]), Step(rng, [1, 1, 1])
    step.lse[:] = 0
    step.missed[:], step.bound[:] = EMPTY, EMPTY
    (step.missed if limit == "guards" else step.bound)[1, 3] = missed  # KV head 1 of the first sequence
    guards, bounds = torch.full((3, KV_HEADS), torch.inf), torch.full((3,), torch.inf)
    ranges = torch.tensor([-torch.inf, torch.inf])[None, :, None, None].repeat(3, 1, SIGNS, Q_HEADS)
    if limit == "guards":
        guards[0, 1] = np.log(0.01)
        guards[0, 0] = guards[1:] = -50
    elif limit == "ranges":
        ranges[0, 1, 2, 3] = -5
    else:
        bounds[:] = 0.005
    zeros = [torch.ones(n, dtype=torch.int32, device=DEVICE) for n in (3, 1)]
    anew = Rereading(
        whole.on_device(),
        guards.to(DEVICE),
        ranges.to(DEVICE),
        bounds.to(DEVICE),
        *zeros,
        torch.tensor([70, 0, 90]).int().to(DEVICE),
    )
    judge(step.on_device(), anew, torch.ones(3, Q_HEADS, 8, device=DEVICE))
    assert anew.needed.tolist() == [needed, 0, 0]
    assert anew.any_needed.tolist() == [needed]
    out, sums = step(anew=anew), step.sums.cpu().numpy()
    for i in range(3):
        right = merge((whole if i == 0 and needed else step).states(i))
        np.testing.assert_allclose(out[i], right.out[:, 0], atol=1e-5)
    found = sums[step.rows[0]]
    assert found[0] == (70 * KV_HEADS if needed else step.counts[1].sum())
    if needed:
        assert found[1:].tolist() == [0, 0, 0]
