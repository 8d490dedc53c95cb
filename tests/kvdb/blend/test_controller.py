"""Recompute is raised only as far as loading hides it, and never below what quality needs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvdb.blend.controller import Choice, Chunks, Rates, choose, pipelined_seconds, ratio_within
from kvdb.errors import InvalidArgument

# 1000 tokens of 1 kB: 1 ms from disk, 0.1 ms from memory, 10 ms from afar; recompute of all takes 10 ms a layer.
RATES = Rates(1e-5, {"disk": 1e9, "memory": 1e10, "remote": 1e8})
ON_DISK = Chunks({"disk": 1000}, 1000, layers=4)

POSITIVE = st.floats(1e-9, 1e12)
TIERS = st.dictionaries(st.sampled_from(["gpu", "memory", "disk", "remote"]), st.one_of(POSITIVE, st.just(math.inf)), min_size=1)
SHARES = st.floats(0, 1)
SCORES = arrays(np.float32, st.integers(1, 60), elements=st.one_of(st.floats(0, 2, width=32), st.just(math.inf)))
LAYERS = st.integers(1, 64)


@st.composite
def cases(draw):
    rates = Rates(draw(POSITIVE), draw(TIERS))
    tokens = draw(st.dictionaries(st.sampled_from(sorted(rates.bytes_per_second)), st.integers(0, 100_000)))
    chunks = Chunks(tokens, draw(st.integers(1, 10_000)), draw(st.integers(1, 80)), draw(st.integers(0, 1000)))
    return rates, chunks, draw(SHARES)


def test_the_floor_is_taken_where_loading_is_hidden():
    choice = choose(RATES, ON_DISK)
    assert (choice.ratio, choice.hidden, choice.tier) == (0.15, True, "disk")
    assert (choice.load_seconds, choice.recompute_seconds) == pytest.approx((1e-3, 1.5e-3))
    assert choice.seconds == pytest.approx(1e-3 + 4 * 1.5e-3)
    assert str(choice) == (
        "recompute 15.0% (floor 15%): loading 1 ms a layer from disk is hidden by 1.5 ms of recompute; best kept in disk"
    )


def test_the_ratio_rises_to_what_a_slow_tier_hides():
    choice = choose(RATES, replace(ON_DISK, token_nbytes=4000))
    assert choice.ratio == pytest.approx(0.4)
    assert choice.hidden
    assert choice.tier == "memory"  # at the floor, loading from disk takes longer than recompute
    assert choice.seconds == pytest.approx(5 * 4e-3)


def test_more_than_everything_is_not_recomputed():
    choice = choose(RATES, Chunks({"remote": 1000}, 3000, layers=4))
    assert (choice.ratio, choice.hidden) == (1.0, False)
    assert "takes longer than 10 ms of recompute" in choice.reason


def test_an_asked_ratio_is_kept():
    slow = choose(RATES, replace(ON_DISK, token_nbytes=4000), ratio=0.05)
    assert (slow.ratio, slow.hidden, slow.tier) == (0.05, False, "memory")
    assert str(slow).startswith(
        "recompute 5.0% (asked for): loading 4 ms a layer from disk takes longer than 0.5 ms of recompute"
    )
    assert choose(RATES, ON_DISK, ratio=1.0).tier == "remote"
    assert choose(RATES, ON_DISK, ratio=0.0).ratio == 0.0


def test_tokens_that_are_computed_anyhow_hide_loading_too():
    choice = choose(RATES, replace(ON_DISK, token_nbytes=4000, fresh=200))
    assert choice.ratio == pytest.approx(0.2)
    assert choice.tier == "memory"
    assert choose(RATES, replace(ON_DISK, token_nbytes=4000, fresh=300)).tier == "disk"


def test_tiers_are_loaded_one_after_the_other():
    choice = choose(RATES, Chunks({"memory": 400, "disk": 600, "remote": 0}, 1000, layers=1))
    assert choice.load_seconds == pytest.approx(0.6e-3 + 0.04e-3)
    assert "from disk and memory" in choice.reason


def test_what_is_in_place_needs_no_loading():
    choice = choose(Rates(1e-5, {"memory": math.inf, "disk": 1e6}), Chunks({"memory": 1000}, 1000, layers=2))
    assert (choice.ratio, choice.load_seconds, choice.hidden, choice.tier) == (0.15, 0.0, True, "memory")
    assert choice.reason == "nothing has to be loaded for 1.5 ms of recompute a layer"


def test_nothing_reused_is_a_choice_too():
    choice = choose(RATES, Chunks({}, 1000, layers=2, fresh=10))
    assert (choice.ratio, choice.hidden, choice.tier) == (0.15, True, None)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (Rates(None, {"disk": 1e9}), "the speed of recompute is not measured yet"),
        (Rates(1e-5), "the speed of loading from disk is not measured yet"),
        (Rates(), "the speed of loading from disk and of recompute is not measured yet"),
        (Rates(math.nan, {"disk": 1e9}), "of recompute is not"),
        (Rates(math.inf, {"disk": 1e9}), "of recompute is not"),
        (Rates(-1.0, {"disk": 1e9}), "of recompute is not"),
        (Rates(1e-5, {"disk": 0.0}), "from disk is not"),
        (Rates(1e-5, {"disk": math.nan}), "from disk is not"),
    ],
)
def test_what_is_not_measured_gives_the_floor(rates, words):
    choice = choose(rates, ON_DISK, floor=0.2)
    assert (choice.ratio, choice.hidden, choice.tier, choice.seconds) == (0.2, False, None, None)
    assert words in choice.reason
    assert str(choice) == f"recompute 20.0% (floor 20%): {choice.reason}"
    assert choose(rates, ON_DISK, ratio=0.3).ratio == 0.3


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_ratios_that_cannot_be_are_refused(share):
    with pytest.raises(InvalidArgument, match="expected a ratio from 0 to 1"):
        choose(RATES, ON_DISK, floor=share)
    with pytest.raises(InvalidArgument, match="expected a ratio from 0 to 1"):
        choose(RATES, ON_DISK, ratio=share)


@given(cases())
def test_the_ratio_is_between_the_floor_and_one_and_the_largest_that_is_hidden(case):
    rates, chunks, floor = case
    choice = choose(rates, chunks, floor)
    assert floor <= choice.ratio <= 1
    assert choice.hidden or choice.ratio == 1
    if chunks.total and floor < choice.ratio < 1:
        assert choice.load_seconds == pytest.approx(choice.recompute_seconds)


@given(cases(), st.floats(1, 1000))
def test_faster_tiers_never_raise_the_ratio_or_the_time(case, factor):
    rates, chunks, floor = case
    faster = Rates(rates.recompute_seconds, {tier: rate * factor for tier, rate in rates.bytes_per_second.items()})
    before, after = choose(rates, chunks, floor), choose(faster, chunks, floor)
    assert after.ratio <= before.ratio + 1e-9
    assert after.seconds <= before.seconds * (1 + 1e-9)


@given(cases(), st.floats(1, 1000))
def test_faster_recompute_never_lowers_the_ratio_or_raises_the_time(case, factor):
    rates, chunks, floor = case
    before, after = (
        choose(rates, chunks, floor),
        choose(replace(rates, recompute_seconds=rates.recompute_seconds / factor), chunks, floor),
    )
    assert after.ratio >= before.ratio - 1e-9
    assert after.seconds <= before.seconds * (1 + 1e-9)
    if before.tier is not None:
        speed = rates.bytes_per_second
        assert speed[after.tier] >= speed[before.tier] * (1 - 1e-6)


@given(cases(), SHARES)
def test_an_asked_ratio_is_always_kept(case, asked):
    rates, chunks, floor = case
    assert choose(rates, chunks, floor, asked).ratio == asked


@given(cases(), st.one_of(st.none(), SHARES))
def test_a_choice_goes_through_json(case, asked):
    choice = choose(*case, asked)
    assert Choice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice
    assert "\n" not in str(choice)


def test_what_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="expected what Choice.to_dict returns"):
        Choice.from_dict({"ratio": 0.5})


def test_a_pipeline_waits_for_the_slower_of_load_and_compute():
    assert pipelined_seconds([], []) == 0
    assert pipelined_seconds([2], [3]) == 5
    assert pipelined_seconds([1, 5, 1], [2, 2, 2]) == 1 + 5 + 2 + 2


@given(SCORES, SHARES, SHARES, LAYERS, LAYERS)
def test_a_larger_budget_and_fewer_layers_never_recompute_more(scores, one, other, few, many):
    (small, large), (few, many) = sorted((one, other)), sorted((few, many))
    assert ratio_within(scores, large, few) <= ratio_within(scores, small, many)


@given(SCORES, SHARES, LAYERS)
def test_the_least_share_keeps_what_all_layers_leave_within_the_budget(scores, error_max, layers):
    """The oracle tries every share, from none on."""
    known = sorted(scores[np.isfinite(scores)].astype(np.float64))
    count = round(ratio_within(scores, error_max, layers) * len(known))
    if error_max == 0:
        assert count == len(known)
        return
    squared = [layers * (sum(known[: len(known) - taken]) / len(known)) ** 2 for taken in range(len(known) + 1)] if known else [0]
    assert squared[count] <= error_max**2 * (1 + 1e-9)
    assert count == 0 or squared[count - 1] > error_max**2 * (1 - 1e-9)


@given(SCORES, LAYERS)
def test_no_budget_recomputes_everything_and_chunks_that_do_not_deviate_nothing(scores, layers):
    assert ratio_within(scores, 0, layers) == float(np.isfinite(scores).any())
    assert ratio_within(np.zeros_like(scores), 1e-9, layers) == 0
    assert ratio_within(scores[:0], 0.5, layers) == 0
