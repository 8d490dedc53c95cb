"""The short form of the faults that `make fault` plays at length."""

from tests.fault import flips, kill


def test_a_killed_process_loses_nothing(tmp_path):
    assert kill.run(tmp_path / "store", kills=4, seed=11) > 0


def test_changed_bits_never_change_an_answer():
    outcomes = flips.run(flips=60, seed=12)
    assert outcomes["told"] + outcomes["refused"] > 0
    assert outcomes["harmless"] > 0
