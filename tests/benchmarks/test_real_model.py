"""The benchmark of real models, shortened: its reference is the plain model, and its measures are what they are called."""

import math
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import DynamicCache

from benchmarks import real_model, real_model_plot
from benchmarks.real_model_steps import Measured
from benchmarks.real_model_texts import DEPTHS, DOCUMENTS, ROOT, load, passage
from benchmarks.real_model_ways import EXACT, Way, at_any_price, ways
from engine_adapter.models import pretrained
from indexes.retrieval import Dipr
from kvdb.config import Config, IndexConfig, OptimizerConfig, WindowConfig
from query_optimizer.query_options import Hints, QueryOptions

pytestmark = pytest.mark.usefixtures("one_thread")

CACHE = pretrained.cache_folder()  # before the tests have one of their own
FETCHED = pretrained.real_model_folder() is not None
TOKENS, STEPS = 288, real_model.ERROR_STEPS
CONFIG = Config(indexes=IndexConfig(segment_tokens_min=64), window=WindowConfig(sink_tokens=4, recent_tokens=32))
FLAT = Hints(index="flat")
NARROW = Way("narrow", "Dipr, flat", QueryOptions(Dipr(0.2), hints=FLAT))
WIDE = Way("wide", "Dipr, flat", QueryOptions(Dipr(1e-30), hints=FLAT))
NO_ERROR = Way("error_max 0", "error_max", QueryOptions(error_max=0.0))
ROUGH = Way("error_max 0.5", "error_max", QueryOptions(error_max=0.5), learns=True)
PROVING = 70
"""Steps of which at least 59 are audited."""
NOISE = Way("noise 0.05", "noise", EXACT.options, noise=0.05)


@pytest.fixture(scope="module")
def subjects():
    """Models that were loaded before, by name."""
    return {}


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.skipif(not FETCHED, reason=pretrained.REASON)), "vault-2m"])
def subject(request, subjects, monkeypatch):
    """A pretrained model where it was fetched, and the demo's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE.parent))
    if request.param not in subjects:
        subjects[request.param] = load(request.param, TOKENS)
    return subjects[request.param]


def test_exact_is_the_plain_model_and_narrow_ranges_are_further_from_it_than_wide_ones(subject, tmp_path):
    prose = passage(subject, "docs", TOKENS, STEPS, 0)
    kv = real_model.keys_and_values(subject, prose, tmp_path)
    assert np.array_equal(real_model.keys_and_values(subject, prose, tmp_path), kv)
    cache = DynamicCache()
    for layer, (k, v) in enumerate(torch.from_numpy(kv)):
        cache.update(k[None], v[None], layer)
    with torch.no_grad():
        logits = subject.model(torch.tensor([prose.ahead[:-1]]), past_key_values=cache).logits[0].double()
    plain = torch.nn.functional.cross_entropy(logits, torch.tensor(prose.ahead[1:])).item()

    batch = [EXACT, NARROW, WIDE, NO_ERROR, NOISE]
    lines = real_model.measure(subject, prose, batch, kv, 0, facts=False, config=CONFIG)
    exact, narrow, wide, no_error, noise = lines
    assert [line["way"] for line in lines] == [way.name for way in batch]
    assert exact["kl"] == 0
    assert exact["same_top"] == 1
    assert exact["attended"] == 1
    assert exact["nll"] == pytest.approx(plain, rel=1e-3)
    assert no_error["kl"] < 1e-6
    assert wide["kl"] < 1e-6 < narrow["kl"]
    assert noise["error_median"] == pytest.approx(0.05, rel=1e-3)
    assert exact["error_p95"] == 0
    assert wide["error_p95"] < 1e-5 < narrow["error_median"]
    assert narrow["attended"] < 0.9 < wide["attended"] == pytest.approx(1)


def test_at_any_price_a_way_that_was_proven_answers(subjects, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE.parent))
    subject = subjects.setdefault("vault-2m", load("vault-2m", TOKENS))
    prose = passage(subject, "docs", TOKENS, STEPS, PROVING)
    kv = real_model.keys_and_values(subject, prose, tmp_path)
    searched = replace(CONFIG, optimizer=OptimizerConfig(rules_off=("short_context",)))
    with at_any_price():
        _, rough = real_model.measure(subject, prose, [EXACT, ROUGH], kv, PROVING, facts=False, config=searched)
    assert rough["ways"].keys() - {"exact"}, "nothing was proven"
    assert rough["kl"] > 0
    assert 0 < rough["error_p95"] <= ROUGH.options.error_max
    assert rough["attended"] < 1


def test_a_passage_holds_its_facts_and_the_text_goes_on_behind_it(subject):
    prose = passage(subject, "docs", TOKENS, STEPS, 4)
    assert len(prose.context) == TOKENS
    assert len(prose.ahead) == STEPS + 1
    assert len(prose.elsewhere) == 5
    assert len(prose.questions) == DEPTHS
    for question in prose.questions:
        told = question.asked + question.answer
        assert prose.context[question.token : question.token + len(told)] == told
    source = subject.encode((ROOT / DOCUMENTS[0]).read_text(encoding="utf-8"))
    behind = prose.questions[-1].token + len(prose.questions[-1].asked) + len(prose.questions[-1].answer)
    tail = prose.context[-8:] + prose.ahead
    assert behind < TOKENS - 8
    assert any(source[i : i + len(tail)] == tail for i in range(2 * TOKENS))


def test_a_text_that_is_too_short_is_an_error(subject):
    with pytest.raises(ValueError, match="expected at least"):
        passage(subject, "docs", TOKENS, 10**7, 4)


@given(hnp.arrays(np.float64, (2, 5), elements=st.floats(-20, 20)), st.integers(0, 4))
def test_the_divergence_and_the_likelihood_are_what_their_formulas_say(logits, following):
    mine, reference = (row - math.log(np.exp(row).sum()) for row in logits)
    measured = Measured()
    measured.add(torch.from_numpy(mine), torch.from_numpy(reference), following)
    assert measured.kl[0] == pytest.approx(sum(math.exp(p) * (p - q) for p, q in zip(reference, mine, strict=True)), abs=1e-9)
    assert measured.nll[0] == pytest.approx(-mine[following])
    assert measured.same_top[0] == (mine.argmax() == reference.argmax())


def test_what_earlier_runs_hold_is_not_run_again_and_can_be_drawn(subject, tmp_path):
    told = {"benchmark": "real_model", "model": subject.name, "text": "docs", "tokens": TOKENS}
    known = [{**told, "way": way.name, "family": way.family, "kl": 0.01, "read": 0.5} for way in ways(quick=True)]
    options = Namespace(steps=STEPS, proof=4, quick=True, ways=None, at_any_price=False)
    assert real_model.point(subject, "docs", TOKENS, options, known) == []
    real_model_plot.draw(known, tmp_path / "plots" / "drawn.png")
    assert (tmp_path / "plots" / "drawn.png").read_bytes().startswith(b"\x89PNG")
