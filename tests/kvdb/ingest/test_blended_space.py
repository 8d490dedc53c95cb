"""What chunks and blended contexts leave behind is given back, whatever was imported, blended, stored and dropped."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvdb
from tests.kvdb.ingest.test_compactor import BLOCK, blocks_of, least_blocks, used_blocks
from tests.stores import SPEC, compacted, config, connect, kv_of, put

TEXTS = [np.r_[np.arange(12 + 9 * i), 40 + i + np.arange(8 * j)] % 64 for i in range(3) for j in range(1, 4)]
"""Some begin alike."""
PARTS = st.lists(st.tuples(st.integers(0, 9), st.floats(0.01, 1)), min_size=1, max_size=3)


def blend(db, parts, recomputed, fresh):
    """A session over parts, of whose first tokens some are recomputed, and which computed `fresh` tokens of its own."""
    session = db.create_session(SPEC, parts=parts)
    tokens = session._transport.tokens
    pairs = kv_of(np.r_[tokens, np.arange(fresh)])
    for layer, (k, v) in enumerate(pairs):
        if n := min(recomputed, len(tokens)):
            session.overlay(layer, np.arange(n), k[:, :n], v[:, :n])
        session.update(layer, k[:, len(tokens) :], v[:, len(tokens) :])
    return session, np.r_[tokens, np.arange(fresh)]


class BlendedSpace(RuleBasedStateMachine):
    """Chunks by name, and blended contexts by name with the blocks that they need by themselves."""

    def __init__(self):
        super().__init__()
        self.db = kvdb.connect(config=config(block_size=BLOCK))
        self.chunks, self.blends, self.sessions, self.made = {}, {}, [], 0

    def name(self):
        self.made += 1
        return str(self.made)

    @rule(text=st.sampled_from(TEXTS))
    def import_chunk(self, text):
        name = self.name()
        self.db.import_chunk(SPEC, text, kv_of(text), name=name)
        self.chunks[name] = text

    @rule(text=st.sampled_from(TEXTS))
    def import_context(self, text):
        name = self.name()
        put(self.db, text, name)
        self.chunks[name] = text

    @precondition(lambda self: self.chunks)
    @rule(picks=PARTS, recomputed=st.integers(0, 12), fresh=st.integers(0, 12))
    def blend(self, picks, recomputed, fresh):
        parts, blocks = [], 0
        for pick, share in picks:
            name = sorted(self.chunks)[pick % len(self.chunks)]
            visible = max(1, int(share * len(self.chunks[name])))
            parts.append(kvdb.PromptPart(name, visible=visible))
            blocks += -(-visible // BLOCK)
        session, tokens = blend(self.db, parts, recomputed, fresh)
        name = self.name()
        self.db.store(session, name=name, tokens=tokens)
        self.blends[name] = SPEC.layers * (blocks + -(-recomputed // BLOCK) + -(-fresh // BLOCK))
        self.sessions.append(session)

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 9))
    def close(self, pick):
        self.sessions.pop(pick % len(self.sessions)).close()

    @precondition(lambda self: self.chunks)
    @rule(pick=st.integers(0, 9))
    def drop_chunk(self, pick):
        name = sorted(self.chunks)[pick % len(self.chunks)]
        self.db.drop(name)
        del self.chunks[name]

    @precondition(lambda self: self.blends)
    @rule(pick=st.integers(0, 9))
    def drop_blend(self, pick):
        name = sorted(self.blends)[pick % len(self.blends)]
        self.db.drop(name)
        del self.blends[name]

    @invariant()
    def space_is_proportional_to_what_is_named(self):
        """A blended session keeps what it stands on until it is closed."""
        least = least_blocks(self.chunks.values()) + sum(self.blends.values())
        assert used_blocks(self.db) <= 1.1 * least + sum(blocks_of(session._transport) for session in self.sessions)

    def teardown(self):
        for session in self.sessions:
            session.close()
        assert used_blocks(self.db) <= 1.1 * (least_blocks(self.chunks.values()) + sum(self.blends.values()))
        for name in [*self.chunks, *self.blends]:
            self.db.drop(name)
        assert not used_blocks(self.db)
        self.db.close()


TestBlendedSpace = BlendedSpace.TestCase
TestBlendedSpace.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("kind", ["memory", "store"])
def test_a_blended_context_holds_what_it_sees_of_a_dropped_chunk(tmp_path, kind):
    """It answers by the same keys and values, also from the files of a store that is opened again."""
    long, short = np.arange(60), np.r_[5, 6, 7, 8, 9]
    db = connect(tmp_path, block_size=BLOCK) if kind == "store" else kvdb.connect(config=config(block_size=BLOCK))
    with db:
        for name, text in (("long", long), ("short", short)):
            db.import_chunk(SPEC, text, kv_of(text), name=name)
        session, tokens = blend(db, ["short", kvdb.PromptPart("long", visible=10)], 2, 1)
        db.store(session, name="blended", tokens=tokens)
        before = session.read([0, 1], 0)
        session.close()
        db.drop("long")
        db.drop("short")
        assert used_blocks(compacted(db), "disk" if kind == "store" else "cpu") <= SPEC.layers * (1 + 2 + 1 + 1)
        db._transport.check_integrity()
        if kind == "memory":
            check(db, before)
    if kind == "store":
        with connect(tmp_path, block_size=BLOCK) as again:
            check(again, before)


def check(db, before):
    with db.create_session(SPEC, parts=["blended"]) as session:
        for pair, expected in zip(session.read([0, 1], 0), before, strict=True):
            assert all((got == want).all() for got, want in zip(pair, expected, strict=True))
