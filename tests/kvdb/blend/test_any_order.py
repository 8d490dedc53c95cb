"""Sessions that are laid out, overlaid, decoded, forked, stored, reused and closed in any order, against the oracle."""

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.database import Database
from tests.kvdb.blend.oracle import ROPES, Oracle, Text
from tests.reference import relative_error

SPEC = kvdb.ModelSpec("any", 2, 2, 1, 8, "float32", ROPES["llama3"])
SEEDS = st.integers(0, 999)
SHARES = st.floats(0, 1)
TEXTS = [Text(SPEC, n, seed, base) for seed, (n, base) in enumerate([(1, 0), (16, 3), (37, 0), (50, 900)])]
TEXTS.append(Text(SPEC, 45, len(TEXTS)).begin_like(TEXTS[2], 20))  # its blocks and the other's are shared

ORDERS = st.lists(st.tuples(st.integers(-1, len(TEXTS) - 1), SHARES), min_size=2, max_size=5)
"""Numbers of texts, -1 for a gap, and how much of each."""


@dataclass(eq=False)
class Known:
    """A session or a stored context, what it holds, and which positions of each layer are overlaid or hold nothing."""

    oracle: Oracle
    overlaid: list
    gaps: list
    session: object = None

    def copy(self, session=None):
        return Known(self.oracle.copy(), [set(s) for s in self.overlaid], [set(s) for s in self.gaps], session)

    def then(self, part):
        """The same with a part behind it: (text, visible), or a number of gaps."""
        begin = self.oracle.length(0)
        more = Oracle(SPEC, [begin, part] if begin else [part])
        for layer in range(SPEC.layers):
            self.oracle.append(layer, more.keys[layer][:, begin:], more.values[layer][:, begin:])
            if not isinstance(part, tuple):
                self.gaps[layer] |= set(range(begin, begin + part))
        self.oracle.start = self.oracle.length(0)


def nothing():
    return Known(Oracle(SPEC), [set(), set()], [set(), set()])


class AnyOrder(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    blended = Bundle("blended")

    @initialize(target=sessions, block_size=st.sampled_from([8, 16]), order=ORDERS)
    def start(self, block_size, order):
        self.engine = Database(Config(storage=StorageConfig(block_size=block_size, arena_bytes=1 << 20)))
        self.db = Client(self.engine)
        self.stored = set()
        self.known = {}
        self.names = 0
        for number in range(len(TEXTS)):
            self.import_chunk(number)
        return self._open(nothing(), [], order)

    @rule(number=st.integers(0, len(TEXTS) - 1))
    def import_again(self, number):
        self.import_chunk(number)

    def import_chunk(self, number):
        if number not in self.stored:
            TEXTS[number].store(self.db, str(number))
            self.stored.add(number)

    @rule(number=st.integers(0, len(TEXTS) - 1))
    def drop_chunk(self, number):
        if number in self.stored:
            self.db.drop(str(number))
            self.stored.remove(number)

    @rule(target=sessions, order=ORDERS)
    def lay_out(self, order):
        return self._open(nothing(), [], order)

    @rule(target=sessions, first=blended, order=ORDERS)
    def reuse(self, first, order):
        if first not in self.known:
            return multiple()
        return self._open(self.known[first].copy(), [first], order)

    def _open(self, known, parts, order):
        pending = 0
        for number, share in order:
            if number < 0:
                count = 1 + int(share * 9)
                parts.append([50_000] * count)
                pending += count
            elif number in self.stored:
                if pending:
                    known.then(pending)
                    pending = 0
                text = TEXTS[number]
                visible = max(1, round(share * text.n))
                parts.append(kvdb.PromptPart(str(number), visible, known.oracle.length(0)))
                known.then((text, visible))
        known.session = self.db.create_session(SPEC, parts=parts)
        known.oracle.start = known.session.start
        assert known.session.start == known.oracle.length(0)
        assert len(known.session.tokens) == known.session.start + pending
        assert sum(placed.tokens for placed in known.session.layout) == known.session.start
        return known

    @rule(known=sessions, seed=SEEDS, share=SHARES)
    def overlay_all(self, known, seed, share):
        for layer in range(SPEC.layers):
            self._overlay(known, layer, seed, share, fill=True)
            self.ask_at(known, layer, seed)

    @rule(known=sessions, layer=st.integers(0, 1), seed=SEEDS, share=SHARES)
    def overlay_some(self, known, layer, seed, share):
        self._overlay(known, layer, seed, share, fill=False)

    def _overlay(self, known, layer, seed, share, fill):
        rng = np.random.default_rng(seed)
        chosen = set(np.flatnonzero(rng.random(known.oracle.start) < share).tolist()) | (known.gaps[layer] if fill else set())
        positions = np.array(sorted(chosen - known.overlaid[layer]), np.int64)
        fresh = Text(SPEC, len(positions), seed)
        known.session.overlay(layer, positions, *fresh.pairs[layer])
        known.oracle.overlay(layer, positions, *fresh.pairs[layer])
        known.overlaid[layer] |= chosen
        known.gaps[layer] -= chosen

    @rule(known=sessions, layer=st.integers(0, 1), seed=SEEDS)
    def refuse_an_overlay(self, known, layer, seed):
        bad = np.full((1, 1, 8), np.nan, np.float32)
        for position in set(range(known.oracle.start)) - known.overlaid[layer]:
            try:
                known.session.overlay(layer, [position], bad, bad)
            except kvdb.errors.NonFiniteError:
                return
            raise AssertionError("NaN was taken")

    def ask_at(self, known, layer, seed):
        if known.gaps[layer] or not known.oracle.start:
            return
        positions = np.flatnonzero(np.random.default_rng(seed).random(known.oracle.start) < 0.3)
        q = Text(SPEC, len(positions), seed).q[layer]
        if len(positions):
            out = known.session.attention(layer, q, positions=positions)
            assert relative_error(out, known.oracle.attention(layer, q, positions)) <= 1e-5

    @rule(known=sessions, n=st.integers(1, 20), seed=SEEDS)
    def attend(self, known, n, seed):
        for layer in range(SPEC.layers):
            if known.gaps[layer]:
                self._overlay(known, layer, seed, 0.0, fill=True)
        fresh = Text(SPEC, n, seed)
        for layer, (k, v) in enumerate(fresh.pairs):
            known.oracle.append(layer, k, v)
            out = known.session.attend(layer, fresh.q[layer], k, v)
            assert relative_error(out, known.oracle.attention(layer, fresh.q[layer])) <= 1e-5

    @rule(target=sessions, known=sessions)
    def fork(self, known):
        return known.copy(known.session.fork())

    @rule(target=blended, known=sessions)
    def store(self, known):
        length = known.oracle.length(0)
        if any(known.gaps) or not length:
            return multiple()
        name = f"blended {self.names}"
        self.names += 1
        tail = length - known.session.start
        ids = np.concatenate([known.session.tokens[: known.session.start], np.arange(tail) + 60_000 + self.names * 1000])
        # The prompt's end was given by its ids.
        given = known.session.tokens[known.session.start :][:tail]
        ids[known.session.start : known.session.start + len(given)] = given
        self.db.store(known.session, name=name, tokens=ids)
        self.known[name] = known.copy()
        return name

    @rule(name=consumes(blended))
    def drop_blended(self, name):
        self.db.drop(name)
        del self.known[name]

    @rule(known=consumes(sessions))
    def close(self, known):
        known.session.close()

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            for context in self.db.contexts():
                context.drop()
            self.engine.handles.close()
            self.engine.check_integrity()
            assert sum(tier.blocks_used for tier in self.engine.tiers()) == 0
            self.engine.close()


AnyOrder.TestCase.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestAnyOrder = AnyOrder.TestCase
