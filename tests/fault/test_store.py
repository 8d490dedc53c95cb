"""The short form of the faults that `make fault` plays at length."""

import shutil

import pytest

from tests.fault import every_call, flips, kill


def test_a_killed_process_loses_nothing(tmp_path):
    assert kill.run(tmp_path / "store", kills=4, seed=11) > 0


def test_changed_bits_never_change_an_answer():
    outcomes = flips.run(flips=60, seed=12)
    assert outcomes["told"] + outcomes["refused"] > 0
    assert outcomes["harmless"] > 0


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(("fault", "call"), [("KILL", "rename"), ("EIO", "unlink")])
def test_a_fault_at_any_call_loses_nothing(fault, call):
    try:
        met = every_call.run_all(fault, calls=(call,))
    except every_call.NotTraced as reason:
        pytest.skip(str(reason))
    assert met[call] > 0
