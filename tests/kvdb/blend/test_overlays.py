"""Recomputing tokens layer by layer: what is overlaid counts, what it masks does not, and gaps are filled."""

from dataclasses import replace
from weakref import WeakSet

import numpy as np
import pytest

import kvdb
from kvdb.attention.materialized import MaterializedKeys
from kvdb.blend.deviation import SCORES
from tests.kvdb.blend.decoding import decode
from tests.kvdb.blend.oracle import ROPES, TOLERANCE, Oracle, Text
from tests.reference import relative_error

GAP = [4000, 4001, 4002, 4003, 4004]
PARTS = [GAP, "b", "a", [4005], kvdb.PromptPart("c", visible=40), "b"]
START = 5 + 70 + 130 + 1 + 40 + 70
GAPS = [0, 1, 2, 3, 4, 205]


@pytest.fixture(params=["half", "interleaved"])
def spec(request, spec):
    return replace(spec, rope=ROPES[request.param])


@pytest.fixture
def laid_out(db, spec, texts):
    """A session over PARTS, and what it holds."""
    for name, text in texts.items():
        text.store(db, name)
    oracle = Oracle(spec, [5, (texts["b"], 70), (texts["a"], 130), 1, (texts["c"], 40), (texts["b"], 70)])
    with db.create_session(spec, parts=PARTS) as session:
        assert (session.start, session.reused) == (START, START - len(GAPS))
        yield session, oracle


def overlay(session, oracle, layer, positions, seed):
    fresh = Text(session.spec, len(positions), seed)
    session.overlay(layer, positions, *fresh.pairs[layer])
    oracle.overlay(layer, positions, *fresh.pairs[layer])
    return fresh


def check_at(session, oracle, layer, positions, seed=50):
    q = Text(session.spec, len(positions), seed).q[layer]
    out = session.attention(layer, q, positions=positions)
    assert relative_error(out, oracle.attention(layer, q, positions)) <= TOLERANCE[session.spec.dtype]


def test_every_step_of_a_recompute_is_what_full_attention_would_give(laid_out):
    """In pieces, as the selected tokens become fewer from layer to layer; what is asked need not be what was overlaid."""
    session, oracle = laid_out
    everything = np.arange(START)
    for layer, share in ((0, 2), (1, 7)):
        chosen = np.union1d(GAPS, everything[::share])
        for piece in np.array_split(chosen, 3):
            overlay(session, oracle, layer, piece, seed=len(piece))
            if layer == 0 and piece[-1] < 205:
                continue  # a gap of it is open
            if not np.isin(GAPS, chosen[: np.searchsorted(chosen, piece[-1]) + 1]).all():
                continue
            check_at(session, oracle, layer, piece)
            check_at(session, oracle, layer, everything)
    decode(session, oracle)


def test_pieces_may_come_in_any_order(laid_out):
    session, oracle = laid_out
    for layer in range(2):
        for positions in ([205, 206, 300], GAPS[:5], [70, 80, 200], [START - 1]):
            overlay(session, oracle, layer, positions, seed=positions[0])
        check_at(session, oracle, layer, [0, 69, 70, 71, 204, 205, 206, 299, 300, START - 1])
    decode(session, oracle)


def test_all_tokens_are_overlaid(laid_out):
    """Everything is recomputed, as at ratio 1, so nothing that is stored counts."""
    session, oracle = laid_out
    everything = np.arange(START)
    for layer in range(2):
        fresh = overlay(session, oracle, layer, everything, seed=3)
        for cut in (slice(0, 1), slice(0, 70), slice(200, START), slice(0, START)):
            out = session.attention(layer, fresh.q[layer][:, cut], positions=everything[cut])
            assert relative_error(out, oracle.attention(layer, fresh.q[layer][:, cut], everything[cut])) <= 1e-5
    decode(session, oracle)


def test_layers_do_not_see_each_others_overlays(laid_out):
    session, oracle = laid_out
    for layer in range(2):
        overlay(session, oracle, layer, GAPS, seed=layer)
    overlay(session, oracle, 0, [100, 110, 316 - 1], seed=5)
    for layer in (0, 1, 0, 1):
        check_at(session, oracle, layer, [3, 110, 200, START - 1], seed=layer)
    decode(session, oracle)


def test_an_overlay_after_the_first_steps_counts_from_then_on(laid_out):
    session, oracle = laid_out
    for layer in range(2):
        overlay(session, oracle, layer, GAPS, seed=layer)
    decode(session, oracle)
    for layer in range(2):
        overlay(session, oracle, layer, [20, 60, 250], seed=9)
        check_at(session, oracle, layer, [20, 60, 250])
    decode(session, oracle)


def test_no_positions_are_no_work(laid_out):
    session, oracle = laid_out
    for layer in range(2):
        overlay(session, oracle, layer, GAPS, seed=layer)
        nothing = Text(session.spec, 0)
        session.overlay(layer, [], *nothing.pairs[layer])
        assert session.attention(layer, nothing.q[layer], positions=[]).shape == (4, 0, 16)
        assert session.deviation(layer, [], *nothing.pairs[layer]).shape == (0,)
    decode(session, oracle)


def test_equal_keys_and_values_do_not_deviate(laid_out, texts):
    """Fresh keys are compared with the stored ones, moved to where they stand now; an overlay stands for what it masks."""
    session, oracle = laid_out
    positions = np.array([0, 4, 5, 74, 75, 204, 205, 206, 245, 246, START - 1])
    for layer in range(2):
        k, v = (np.nan_to_num(x[layer][:, positions]).astype(np.float32) for x in (oracle.keys, oracle.values))
        deviations = session.deviation(layer, positions, k, v)
        assert deviations.dtype == np.float32
        assert np.isinf(deviations).tolist() == np.isin(positions, GAPS).tolist()
        assert deviations[np.isfinite(deviations)].max() <= 1e-5
        other = k.copy()
        other[:, 3] *= -1
        changed = session.deviation(layer, positions, other, v, score="relative")
        assert changed[3] == pytest.approx(2, abs=1e-4)
        overlay(session, oracle, layer, [*GAPS, 246], seed=4)
        k, v = (x[layer][:, positions].astype(np.float32) for x in (oracle.keys, oracle.values))
        assert session.deviation(layer, positions, k, v).max() <= 1e-5


@pytest.mark.parametrize("score", SCORES)
def test_the_score_of_a_token_does_not_depend_on_gaps(laid_out, score):
    session, _ = laid_out
    fresh = Text(session.spec, 3, seed=2)
    k, v = fresh.pairs[0]
    with_gap = session.deviation(0, [4, 20, 90], k, v, score=score)
    assert with_gap[0] == np.inf
    assert with_gap[1:].tolist() == session.deviation(0, [20, 90], k[:, 1:], v[:, 1:], score=score).tolist()


def test_torch_tensors_go_in_and_come_out(laid_out):
    torch = pytest.importorskip("torch")
    session, oracle = laid_out
    fresh = Text(session.spec, len(GAPS), seed=1)
    k, v, q = (torch.from_numpy(x[0]) for x in (fresh.k, fresh.v, fresh.q))
    positions = torch.tensor(GAPS)
    assert isinstance(session.deviation(0, positions, k, v), torch.Tensor)
    session.overlay(0, positions, k, v)
    oracle.overlay(0, GAPS, *fresh.pairs[0])
    out = session.attention(0, q, positions=positions)
    assert isinstance(out, torch.Tensor)
    assert relative_error(out.numpy(), oracle.attention(0, fresh.q[0], GAPS)) <= 1e-5


def test_the_longest_run_of_layers_that_is_recomputed_is_one(engine, spec, texts, monkeypatch):
    """What recomputing keeps beside the blocks is one layer, and it is given back at the first step of decoding."""
    from kvdb.types import PromptPart

    for name, text in texts.items():
        writing = engine.begin_import(spec, text.tokens, name, text.base)
        for layer, (k, v) in enumerate(text.pairs):
            writing.write(layer, k, v)
        writing.commit()
    session = engine.create_session_of_parts(spec, [PromptPart("a"), PromptPart("b")])
    fresh = Text(spec, 2)
    runs = WeakSet()
    init = MaterializedKeys.__init__
    monkeypatch.setattr(MaterializedKeys, "__init__", lambda run, *given: (runs.add(run), init(run, *given))[1])
    for layer in range(2):
        session.overlay(layer, np.array([10, 150]), *fresh.pairs[layer])
        session.attention_at(layer, fresh.q[layer], np.array([10, 150]))
        assert len(runs) == 1
    session.update(0, *fresh.pairs[0])
    assert not runs
    session.close()
