"""Space is proportional to what contexts name, whatever was stored, forked and dropped, and no answer changes."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvdb
from kvdb.catalog.reachable import reachable_blocks
from tests.reference import attention, relative_error
from tests.stores import SPEC, config, holds, kv_of, put

BLOCK = 8


def used_blocks(db, tier="cpu"):
    """The blocks of all layers that are used in memory, or in files."""
    return sum(stats.blocks_used for stats in db.tiers() if stats.name == tier)


def least_blocks(texts, block=BLOCK):
    """The least number of blocks of all layers for these texts."""
    return SPEC.layers * reachable_blocks([np.asarray(text, np.int32) for text in texts], block)


def text(trunk, leave, end):
    """One of a few texts that share beginnings: it leaves the counting from 0 at `leave` for numbers that depend on `trunk`."""
    return np.r_[np.arange(leave), 20 + 11 * trunk + np.arange(end)] % 64


TEXTS = {"trunk": st.integers(0, 3), "leave": st.integers(0, 60), "end": st.integers(1, 45)}


class Space(RuleBasedStateMachine):
    """Contexts and sessions come and go beside a dictionary of what was named and a list of what is open."""

    def __init__(self):
        super().__init__()
        self.db = kvdb.connect(config=config(block_size=BLOCK))
        self.model, self.sessions, self.made = {}, [], 0

    def name(self, tokens):
        self.made += 1
        self.model[str(self.made)] = tokens
        return str(self.made)

    @rule(**TEXTS)
    def import_context(self, trunk, leave, end):
        tokens = text(trunk, leave, end)
        put(self.db, tokens, self.name(tokens))

    @rule(**TEXTS, tail=st.integers(1, 30))
    def open_session(self, trunk, leave, end, tail):
        """Open a session on a text and have it compute the rest of it."""
        tokens = text(trunk, leave, end)
        session = self.db.create_session(SPEC, tokens)
        self.sessions.append((session, tokens[: session.reused]))
        self.extend(-1, tokens[session.reused :])

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9), more=st.lists(st.integers(0, 3), min_size=1, max_size=20))
    def go_on(self, pick, more):
        self.extend(pick % len(self.sessions), np.array(more))

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9))
    def fork(self, pick):
        session, tokens = self.sessions[pick % len(self.sessions)]
        self.sessions.append((session.fork(), tokens))

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9))
    def store(self, pick):
        session, tokens = self.sessions[pick % len(self.sessions)]
        if len(tokens):
            self.db.store(session, name=self.name(tokens), tokens=tokens)

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9))
    def close(self, pick):
        self.sessions.pop(pick % len(self.sessions))[0].close()

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 9))
    def drop(self, pick):
        name = sorted(self.model)[pick % len(self.model)]
        self.db.drop(name)
        del self.model[name]

    @invariant()
    def space_is_proportional_to_what_is_named(self):
        own = sum(session_blocks(session) for session, _ in self.sessions)
        assert used_blocks(self.db) <= 1.1 * least_blocks(self.model.values()) + own

    @invariant()
    def every_reference_has_its_owner(self):
        self.db._transport.check_integrity()

    def extend(self, pick, more):
        session, tokens = self.sessions[pick]
        together = np.r_[tokens, more]
        for layer, (k, v) in enumerate(kv_of(together)):
            session.update(layer, k[:, len(tokens) :], v[:, len(tokens) :])
        self.sessions[pick] = session, together

    def teardown(self):
        for session, tokens in self.sessions:
            if len(tokens):
                check(session, tokens)
            session.close()
        assert all(holds(self.db, tokens) for tokens in self.model.values())
        assert used_blocks(self.db) <= 1.1 * least_blocks(self.model.values())
        for name in self.model:
            self.db.drop(name)
        assert not used_blocks(self.db)
        self.db.close()


TestSpace = Space.TestCase


def session_blocks(session):
    """The blocks of all layers that a session holds of its own, or of segments that contexts may not name any more."""
    state = session._transport
    own = sum(len(table.blocks) for table in state.own_tables())
    return own + sum(len(table.blocks) for view in state.views for table in view.segment.tables)


def check(session, tokens):
    """A session answers by the keys and values of its tokens."""
    q = np.random.default_rng(3).standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
    for layer, (k, v) in enumerate(kv_of(tokens)):
        assert relative_error(session.attention(layer, q), attention(q, k, v, SPEC.softmax_scale)[0]) < 1e-5
