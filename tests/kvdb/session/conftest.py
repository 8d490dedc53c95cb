"""Fixtures of the tests of sessions."""

import pytest

import kvdb.indexing.background_time as background_time
import kvdb.session.audits as audits


@pytest.fixture
def fast_searches(monkeypatch):
    """As on a machine where a search takes a fifth of the time of reading everything, so that each answer can be compared, which
    it is by itself."""
    monkeypatch.setattr(audits, "RECENT_QUERIES", 1)
    monkeypatch.setattr(background_time, "SHARE", 1e9)
    monkeypatch.setattr(audits, "WORTH_SHARE", 0.0)
    monkeypatch.setattr(audits, "time_share", lambda shadow_ns, exact_ns: 0.2)
