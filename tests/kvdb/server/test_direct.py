"""Whatever fails of the parts of gRPC that are not public, a session goes on through the public ones."""

from types import SimpleNamespace

import numpy as np
import pytest

import kvdb.client.remote.direct as direct
from kvdb.errors import Unavailable


def without(part):
    """gRPC's private module, but for one name."""
    return SimpleNamespace(**{name: getattr(direct.cygrpc, name) for name in dir(direct.cygrpc) if name != part})


@pytest.fixture
def step(spec):
    q, kv = np.ones((spec.q_heads, 1, 16), np.float32), np.ones((spec.kv_heads, 1, 16), np.float32)
    return q, kv, kv


@pytest.mark.parametrize("part", ["PropagationConstants", "ReceiveStatusOnClientOperation", "SendMessageOperation"])
def test_what_fails_before_a_request_is_sent_goes_unnoticed(client, spec, step, monkeypatch, part):
    monkeypatch.setattr(direct, "cygrpc", without(part))
    with client.create_session(spec, [1, 2]) as session:
        assert np.array_equal(session.attend(0, *step), np.ones((spec.q_heads, 1, 16), np.float32))
        session.attend(0, *step, start=1)
        assert type(session._transport._stream).__name__ == "StreamDecode"


def test_what_fails_afterwards_is_unavailable_once(client, spec, step, monkeypatch):
    with client.create_session(spec, [1, 2]) as session:
        session.attend(0, *step)
        monkeypatch.setattr(direct, "cygrpc", without("OperationType"))
        with pytest.raises(Unavailable, match="the installed gRPC .* failed while it waited"):
            session.attend(0, *step)
        queries = session.stats().queries
        session.attend(0, *step)
        assert session.stats().queries == queries + 1
