"""The short form of `make fuzz-service`: every call of the service several times, with whatever its descriptor allows."""

import random

import pytest

from kvdb.rpc.call import SERVICE
from tests.fuzz.messages import Messages
from tests.fuzz.service import SPEC, TOKENS, Finding, fuzzed

CALLS = 400


def test_whatever_comes_in_every_call_ends_with_a_status_and_nothing_leaks(tmp_path):
    with fuzzed(tmp_path, seed=1) as run:
        run.run(CALLS, seconds=60)
        assert run.calls == CALLS
        assert run.codes["OK"] > CALLS // 20
        assert run.codes["INVALID_ARGUMENT"] > CALLS // 20


def test_an_admin_and_a_store_end_as_well(tmp_path):
    with fuzzed(tmp_path, seed=2, admin=True, store=True) as run:
        run.run(CALLS // 2, seconds=60)
        assert run.codes["OK"] > CALLS // 40


def test_a_leak_would_be_found(tmp_path, monkeypatch):
    """With one tenant's credential taken for another's, the fuzzer sees what is not its own."""
    with fuzzed(tmp_path, seed=1) as run:
        globex = run.tokens["globex"]
        with monkeypatch.context() as patch:
            patch.setitem(run.tokens, "acme", globex)
            with pytest.raises(Finding, match="the other tenant"):
                run.run(CALLS, seconds=60)


def test_a_case_is_made_again_from_its_seed():
    def requests():
        source = Messages(random.Random("1:2"), SPEC, TOKENS.tobytes(), ["doc"], ["session"])
        return [source.raw(method.input_type) for method in SERVICE.methods]

    assert requests() == requests()
