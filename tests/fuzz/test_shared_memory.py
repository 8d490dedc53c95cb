"""The short form of `make fuzz-shared-memory`."""

import pytest

from kvdb.session.state import SessionState
from tests.fuzz.shared_memory import Finding, fuzzed

CASES = 400


def test_whatever_is_written_is_answered_or_ends_the_region():
    with fuzzed(seed=1) as run:
        run.run(CASES, seconds=60)
        assert run.cases >= CASES
        assert run.answers[""] > CASES // 10
        assert run.answers["InvalidArgument"] > CASES // 10


def test_a_bug_would_be_found(monkeypatch):
    def bug(*_given, **_more):
        raise RuntimeError("a bug")

    with fuzzed(seed=1) as run, monkeypatch.context() as patch:
        patch.setattr(SessionState, "attend", bug)
        with pytest.raises(Finding, match="InternalError"):
            run.run(CASES, seconds=60)
