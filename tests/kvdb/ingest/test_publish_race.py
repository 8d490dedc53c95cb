"""Contexts are published over segments that are laid out anew meanwhile: each is found, whole, and nothing is held in vain."""

import numpy as np
import pytest
from hypothesis import settings

import kvdb
from tests.kvdb.ingest.test_compactor import BLOCK, least_blocks, used_blocks
from tests.racing import race
from tests.stores import SPEC, compacted, config, connect, holds, kv_of, put

SECONDS = 0.4 if settings.default.max_examples < 100 else 15
"""How long the calls race; the long form is that of `make test-long`."""
ENDS = 20
"""Texts of a thread, after which it begins anew."""


class Texts:
    """What one thread stores and drops: texts that leave a common beginning at random, each of which goes on from one before."""

    def __init__(self, db, seed):
        self.db, self.seed = db, seed
        self.rng = np.random.default_rng(seed)
        self.stored = {}
        self.made = 0

    def text(self):
        leave, end = int(self.rng.integers(0, 60)), int(self.rng.integers(1, 30))
        return np.r_[np.arange(leave), (leave + 17 * int(self.rng.integers(0, 3)) + np.arange(end))] % 64

    def name(self, tokens):
        self.made += 1
        self.stored[f"{self.seed} {self.made}"] = tokens
        return f"{self.seed} {self.made}"

    def import_one(self):
        tokens = self.text()
        put(self.db, tokens, self.name(tokens))
        self.drop_one()

    def store_one(self):
        """Publish over views that were matched before, and over those of a session whose contexts may be gone."""
        tokens = self.text()
        with self.db.create_session(SPEC, tokens) as session:
            for layer, (k, v) in enumerate(kv_of(tokens)):
                session.update(layer, k[:, session.reused :], v[:, session.reused :])
            self.drop_one()
            self.db.store(session, name=self.name(tokens), tokens=tokens)

    def drop_one(self):
        while len(self.stored) > (0 if self.rng.integers(0, ENDS) == 0 else 3):
            self.db.drop(name := sorted(self.stored)[int(self.rng.integers(0, len(self.stored)))])
            del self.stored[name]


@pytest.mark.parametrize("kind", ["memory", "store"])
def test_contexts_are_whole_though_their_segments_are_replaced_meanwhile(tmp_path, kind):
    db = connect(tmp_path, block_size=BLOCK) if kind == "store" else kvdb.connect(config=config(block_size=BLOCK))
    with db:
        importing, storing, both = (Texts(db, seed) for seed in range(3))
        race(importing.import_one, storing.store_one, both.store_one, seconds=SECONDS)
        compacted(db)
        named = [tokens for texts in (importing, storing, both) for tokens in texts.stored.values()]
        assert all(holds(db, tokens) for tokens in named)
        assert used_blocks(db, "disk" if kind == "store" else "cpu") <= 1.1 * least_blocks(named)
        db._transport.check_integrity()
