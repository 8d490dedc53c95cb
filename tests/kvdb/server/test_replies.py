"""A unary call is answered through gRPC's public API where the function that sends reply and status together fails."""

from types import SimpleNamespace

import pytest

import kvdb
from kvdb import errors
from kvdb.server import replies

PRIVATE = replies.private


class Counted:
    """gRPC's own function, or one that fails; and how often it was called."""

    def __init__(self, failure=None):
        self.calls = 0
        self.failure = failure

    def __call__(self, *arguments):
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        PRIVATE._status(*arguments)


def answered(target):
    """Replies and errors of short calls."""
    with kvdb.connect(target) as db:
        assert db.contexts() == []
        with pytest.raises(errors.NotFound, match="doc"):
            db.get("doc")
        assert db.tiers() == []


def test_a_reply_goes_with_its_status(serve, monkeypatch):
    together = Counted()
    monkeypatch.setattr(replies, "private", SimpleNamespace(_status=together))
    answered(serve().target)
    assert together.calls >= 3


@pytest.mark.parametrize("failure", [AttributeError("state"), TypeError("takes 4 arguments"), RuntimeError("no batch")], ids=repr)
def test_what_fails_once_is_not_used_again(serve, monkeypatch, failure):
    together = Counted(failure)
    monkeypatch.setattr(replies, "private", SimpleNamespace(_status=together))
    server = serve()
    answered(server.target)
    answered(server.target)
    assert together.calls == 1


@pytest.mark.parametrize("private", [None, SimpleNamespace()], ids=["no module", "no function"])
def test_a_grpc_without_it(serve, monkeypatch, private):
    monkeypatch.setattr(replies, "private", private)
    answered(serve().target)
