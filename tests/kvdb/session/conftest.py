"""Fixtures of the tests of sessions."""

import pytest

import kvdb.session.audits as audits


@pytest.fixture
def fast_searches(monkeypatch):
    """As on a machine where a search takes a fifth of the time of reading everything, so that each answer can be compared."""
    monkeypatch.setattr(audits, "SHADOW_SHARE", 1e9)
    monkeypatch.setattr(audits, "time_share", lambda shadow_ns, exact_ns: 0.2)
