"""What an engine with a cache of its own has from kvdb, embedded and remote."""

import numpy as np
import pytest

from engine_adapter.base import SequenceKv
from engine_adapter.contexts import ModelContexts
from kvdb.errors import PositionError
from tests.reference import TOLERANCE, attention, relative_error


@pytest.fixture
def contexts(db, spec):
    return ModelContexts(db, spec, "tests")


def hand_over(sequence: SequenceKv, kv, stop):
    """Give it the KV of tokens up to `stop` that it lacks."""
    start = sequence.start
    for layer, (k, v) in enumerate(kv.pairs(start, stop)):
        sequence.update(layer, k, v, start=start)


def kept(contexts, kv, stop, salt=""):
    with contexts.open(kv.tokens[:stop], salt) as session:
        hand_over(session, kv, stop)
        return contexts.keep(session, kv.tokens[:stop], salt)


def test_a_prefix_is_found_to_the_token(contexts, spec, make_kv):
    kv = make_kv(spec, 150)
    assert contexts.find(kv.tokens) == 0
    kept(contexts, kv, 101)
    assert contexts.find(kv.tokens) == 101
    assert contexts.find(kv.tokens[:77]) == 77
    assert contexts.find(np.concatenate([kv.tokens[:50], kv.tokens[:50]])) == 50


def test_nothing_is_found_under_another_salt(contexts, spec, make_kv):
    kv = make_kv(spec, 80)
    one, other = kept(contexts, kv, 80, "one"), kept(contexts, kv, 80, "other")
    assert one != other
    assert contexts.find(kv.tokens, "one") == 80
    assert contexts.find(kv.tokens) == 0


def test_the_same_tokens_are_kept_once(contexts, spec, make_kv, db):
    kv = make_kv(spec, 80)
    assert kept(contexts, kv, 80) == kept(contexts, kv, 80)
    assert len(db.contexts()) == 1


def test_blocks_are_read_as_they_were_handed_over(contexts, spec, make_kv):
    kv = make_kv(spec, 150)
    kept(contexts, kv, 101)
    with contexts.open(kv.tokens) as session:
        assert session.reused == 101
        for start in range(0, 101, 16):
            stop = min(start + 16, 101)
            for (k, v), (expected_k, expected_v) in zip(session.read([0, 1], start, stop), kv.pairs(start, stop), strict=True):
                assert np.array_equal(k, expected_k)
                assert np.array_equal(v, expected_v)


def test_a_fork_attends_what_a_truncated_sequence_forgot(contexts, spec, make_kv):
    kv = make_kv(spec, 90)
    with contexts.open(kv.tokens[:60]) as session:
        hand_over(session, kv, 80)
        with session.fork() as fork:
            session.truncate(70)
            with pytest.raises(PositionError):
                session.update(0, *kv.pairs(80, 81)[0], start=80)
            for sequence, stop in ((session, 70), (fork, 80)):
                k, v = kv.k[0][:, : stop + 1], kv.v[0][:, : stop + 1]
                q = kv.q[0][:, stop : stop + 1]
                out = sequence.attend(0, q, k[:, stop:], v[:, stop:], start=stop)
                assert relative_error(out, attention(q, k, v, spec.softmax_scale, new=1)[0]) < TOLERANCE["float32"]
