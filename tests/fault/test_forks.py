"""The short form of the forks that `make fault` plays at length."""

from tests.fault import forks


def test_no_child_has_what_its_parent_has_open():
    assert forks.run(forks=12, seed=3) > 0
