"""The soak, for a moment: its answers are right, and nothing is left behind. `make soak` is the long form."""

from benchmarks.service_soak import slope_of, soak


def test_a_short_soak_is_right():
    assert soak(1.0, workers=2, seed=1)


def test_growth_is_seen():
    steady = [(float(second), 1_000_000 + 100 * (second % 7)) for second in range(600)]
    growing = [(second, nbytes + 50 * second) for second, nbytes in steady]
    assert abs(slope_of(steady)) < 0.001
    assert 0.02 < slope_of(growing) < 0.04
