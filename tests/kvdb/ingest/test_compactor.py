"""Space is proportional to what contexts name, whatever was stored, forked and dropped, and no answer changes."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvdb
from kvdb.catalog.compaction.reachable import reachable_blocks
from tests.reference import attention, relative_error
from tests.stores import SPEC, compacted, config, connect, holds, kv_of, put

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
        self.model, self.sessions, self.imports, self.made = {}, [], [], 0

    def name(self, tokens):
        self.made += 1
        self.model[str(self.made)] = tokens
        return str(self.made)

    @rule(**TEXTS)
    def import_context(self, trunk, leave, end):
        tokens = text(trunk, leave, end)
        put(self.db, tokens, self.name(tokens))

    @rule(**TEXTS)
    def begin_import(self, trunk, leave, end):
        """Write an import, which is finished when others may have stored the same."""
        tokens = text(trunk, leave, end)
        writer = self.db._transport.begin_import(SPEC, tokens.astype(np.int32), f"import {self.made}")
        for layer, (k, v) in enumerate(kv_of(tokens)):
            writer.write(layer, k[:, writer.start :], v[:, writer.start :])
        self.imports.append((writer, f"import {self.made}", tokens))
        self.made += 1

    @precondition(lambda self: self.imports)
    @rule(pick=st.integers(0, 9))
    def finish_import(self, pick):
        writer, name, tokens = self.imports.pop(pick % len(self.imports))
        writer.commit()
        self.model[name] = tokens

    @rule(**TEXTS)
    def open_session(self, trunk, leave, end):
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

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, pick, share):
        session, tokens = self.sessions[pick % len(self.sessions)]
        kept = int(share * len(tokens))
        session.truncate(kept)
        self.sessions[pick % len(self.sessions)] = session, tokens[:kept]

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 9))
    def drop(self, pick):
        name = sorted(self.model)[pick % len(self.model)]
        self.db.drop(name)
        del self.model[name]

    @invariant()
    def space_is_proportional_to_what_is_named(self):
        """By contexts, and by sessions as their beginnings; beside it, tails and imports hold blocks of their own."""
        begun = [tokens[: session._transport.start] for session, tokens in self.sessions]
        own = sum(len(table.blocks) for session, _ in self.sessions for table in session._transport.own_tables())
        own += sum(blocks_of(writer) for writer, *_ in self.imports)
        assert used_blocks(self.db) <= 1.1 * least_blocks([*self.model.values(), *begun]) + own

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
        for writer, *_ in self.imports:
            writer.abort()
        assert all(holds(self.db, tokens) for tokens in self.model.values())
        assert used_blocks(self.db) <= 1.1 * least_blocks(self.model.values())
        for name in self.model:
            self.db.drop(name)
        assert not used_blocks(self.db)
        self.db.close()


TestSpace = Space.TestCase


def blocks_of(handle):
    """The blocks of all layers that an import holds of its own, or of segments that contexts may not name any more."""
    own = sum(len(table.blocks) for table in handle.own_tables())
    return own + sum(len(table.blocks) for view in handle.views for table in view.segment.tables)


def check(session, tokens):
    """A session answers by the keys and values of its tokens."""
    q = np.random.default_rng(3).standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
    for layer, (k, v) in enumerate(kv_of(tokens)):
        assert relative_error(session.attention(layer, q), attention(q, k, v, SPEC.softmax_scale)[0]) < 1e-5


def test_a_chat_stored_turn_by_turn_is_compacted_in_a_store(tmp_path):
    """Its contexts are there when the store is opened again, in files that hold hardly more than its tokens."""
    tokens = np.arange(300) % 64
    with connect(tmp_path, block_size=BLOCK) as db:
        for end in range(10, 301, 10):
            put(db, tokens[:end], f"turn {end}")
        compacted(db)
        db._transport.check_integrity()
        assert used_blocks(db, "disk") <= 1.1 * least_blocks([tokens])
    with connect(tmp_path, block_size=BLOCK) as db:
        assert all(holds(db, tokens[:end]) for end in range(10, 301, 10))
        for end in range(20, 301, 10):
            db.drop(f"turn {end}")
        compacted(db)
        assert used_blocks(db, "disk") <= 1.1 * least_blocks([tokens[:10]])
        assert holds(db, tokens[:10])


def test_imports_at_once_share_what_they_begin_with():
    """Three texts are written before any of them is stored; each part is held once afterwards."""
    texts = [np.r_[np.arange(32), 20], np.r_[0, 20 + np.arange(38)], np.r_[np.arange(49), 20]]
    with kvdb.connect(config=config(block_size=BLOCK)) as db:
        writers = []
        for number, tokens in enumerate(texts):
            writers.append(db._transport.begin_import(SPEC, tokens.astype(np.int32), str(number)))
            for layer, (k, v) in enumerate(kv_of(tokens)):
                writers[-1].write(layer, k, v)
        for writer in writers:
            writer.commit()
        assert used_blocks(db) <= 1.1 * least_blocks(texts)
        assert all(holds(db, tokens) for tokens in texts)


def test_a_text_that_hangs_in_the_middle_of_a_session_s_is_found_when_the_session_is_stored():
    """It was stored while contexts saw less of the segment that the session stands on."""
    whole, middle = np.arange(40), np.r_[np.arange(20), 50 + np.arange(9)]
    with kvdb.connect(config=config(block_size=BLOCK)) as db:
        put(db, whole, "whole")
        put(db, np.r_[np.arange(12), 60], "beginning")
        with db.create_session(SPEC, whole) as session:
            db.drop("whole")
            put(db, middle, "middle")
            db.store(session, name="again", tokens=whole)
            assert holds(db, middle)
        texts = [whole, middle, np.r_[np.arange(12), 60]]
        assert all(holds(db, tokens) for tokens in texts)
        assert used_blocks(db) <= 1.1 * least_blocks(texts)
