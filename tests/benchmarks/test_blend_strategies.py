"""The strategies that the benchmark of blending compares with compute what they are meant to."""

import pytest
from hypothesis import given

from benchmarks.blend_strategies import First, Random
from kvdb.blend.strategies import Recompute, inside
from tests.kvdb.blend.test_strategies import RATIOS, spans


def chosen(strategy, spans, total, ratio):
    return strategy(Recompute(ratio), spans, total, 1).start()


@pytest.mark.parametrize("strategy", [First, Random])
@given(spans(), RATIOS)
def test_they_take_the_share_that_was_asked_for(strategy, chunks, ratio):
    flags = chosen(strategy, *chunks, ratio)
    chunk = inside(*chunks)
    assert flags.shape == (chunks[1],)
    assert not (flags & ~chunk).any()
    assert flags.sum() == pytest.approx(ratio * chunk.sum(), abs=0.5)


@given(spans(), RATIOS)
def test_first_takes_heads_of_equal_length(chunks, ratio):
    flags = chosen(First, *chunks, ratio)
    served = [(begin, end) for begin, end in chunks[0] if begin > 0]
    taken = [int(flags[begin:end].sum()) for begin, end in served]
    for (begin, _), count in zip(served, taken, strict=True):
        assert flags[begin : begin + count].all()
    unfilled = [count for (begin, end), count in zip(served, taken, strict=True) if count < end - begin]
    if unfilled:
        assert max(taken) - min(unfilled) <= 1
        assert unfilled == sorted(unfilled, reverse=True)
        assert not any(flags[begin:end].any() for begin, end in chunks[0] if begin == 0)


def test_first_gives_the_rest_of_short_chunks_to_longer_ones():
    chunks = [(0, 40), (40, 42), (42, 62), (62, 100)]
    taken = [int(chosen(First, chunks, 100, 0.12)[begin:end].sum()) for begin, end in chunks]
    assert taken == [0, 2, 5, 5]


def test_first_never_computes_the_first_chunk_before_all_others():
    assert chosen(First, [(0, 50), (50, 60)], 60, 0.5)[50:].all()
    assert chosen(First, [(0, 50), (50, 60)], 60, 0.5).sum() == 30


def test_random_is_the_same_for_the_same_chunks_and_leaves_no_chunk_out():
    flags = chosen(Random, [(10, 400), (400, 500)], 500, 0.3)
    assert (flags == chosen(Random, [(10, 400), (400, 500)], 500, 0.3)).all()
    assert flags[:400].any()
    assert flags[400:].any()
    assert not flags[:400].all()
