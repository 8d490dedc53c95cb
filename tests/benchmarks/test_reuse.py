"""Queries of a course come back as often as those of a real model."""

import numpy as np

from benchmarks.reuse import REUSED, course, reused


def test_what_comes_back_is_counted_by_how_long_ago_it_was():
    steps = [np.array([0, 1])] * 64 + [np.array([0, 2]), np.array([2, 3]), np.array([1])]
    assert reused(steps) == {1: 2 / 5, 4: 3 / 5, 16: 3 / 5, 64: 3 / 5}
    assert reused([np.arange(3)] * 10) == dict.fromkeys(REUSED, 0)  # nothing is old enough to be counted


def test_a_course_comes_back_about_as_often_as_was_measured_and_seldom_more():
    rng = np.random.default_rng(0)
    courses = [reused([np.array([query]) for query in course(rng, 64, 264)]) for _ in range(8)]
    for window, share in REUSED.items():
        assert share - 0.15 < np.mean([one[window] for one in courses]) < share + 0.02
