"""The states of a layer between two steps: whatever is done in whatever order, answers are those of float64 over what is held."""

from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kvdb
from kvdb import Dipr, Exact, QueryOptions, TopK
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.session.runner import LayerState
from tests.database import database, small_config
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("m", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
STORED, SESSIONS_MAX = 400, 4
ASKED = {
    "exact": (QueryOptions(Exact()), 1e-5),
    "bounded": (QueryOptions(TopK(20), max_missed_mass=1e-4), 1e-3),
    "range": (QueryOptions(Dipr(1e-7)), 1e-4),
    "budget": (QueryOptions(error_max=0.05), 0.2),  # held by most queries
    "default": (QueryOptions(error_max=0.0), 1e-5),
}
PICK, LAYER = st.integers(0, 99), st.integers(0, 1)


class Twin:
    """A session, and what it holds: k, v `[kv_heads, n, head_dim]` of each layer."""

    def __init__(self, session, held):
        self.session = session
        self.held = held

    @property
    def lengths(self):
        return [k.shape[1] for k, _ in self.held]

    def append(self, layer, k, v):
        self.held[layer] = tuple(np.concatenate([old, new], axis=1) for old, new in zip(self.held[layer], (k, v), strict=True))

    def layer(self, number):
        return self.session._transport._layers[number]


class StepMachine(RuleBasedStateMachine):
    """Sessions beside arrays. seen: the states that layers were in."""

    seen: ClassVar[set[LayerState]] = set()

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(7)
        self.folder, config = TemporaryDirectory(), small_config(tail_tokens=32)
        config = replace(config, storage=replace(config.storage, disk_path=self.folder.name))
        self.opened = database(config=config)
        self.engine = self.opened.__enter__()
        self.db = Client(self.engine)
        self.contexts, self.twins, self.number = {}, [], 0

    @initialize(tokens=st.sampled_from([60, STORED]))
    def begin(self, tokens):
        held = [self.arrays(2, tokens) for _ in range(2)]
        self.contexts["first"] = np.arange(tokens), held
        self.db.import_context(SPEC, np.arange(tokens), held, name="first")

    def arrays(self, heads, n):
        k, v = self.rng.standard_normal((2, heads, n, 16)).astype(np.float32)
        return k, v

    def query(self, n):
        return (self.rng.standard_normal((4, n, 16)) * 4).astype(np.float32)

    def picked(self, pick):
        return self.twins[pick % len(self.twins)]

    def check(self, twin, layer, q, out, tolerance):
        n = q.shape[1]
        right, _ = attention(q, *twin.held[layer], SPEC.softmax_scale, new=n)
        assert relative_error(out, right) <= tolerance
        self.look()

    def look(self):
        self.seen.update(twin.layer(number).state for twin in self.twins for number in range(2))

    @precondition(lambda self: len(self.twins) < SESSIONS_MAX)
    @rule(pick=PICK)
    def open(self, pick):
        names = sorted(self.contexts)
        nothing = np.zeros(0, np.int64), [(np.zeros((2, 0, 16), np.float32),) * 2] * 2
        tokens, held = self.contexts[names[pick % len(names)]] if names else nothing
        session = self.db.create_session(SPEC, tokens)
        assert session.reused == len(tokens)
        self.twins.append(Twin(session, list(held)))
        self.look()

    @precondition(lambda self: self.twins)
    @rule(pick=PICK, layer=LAYER, n=st.integers(1, 40))
    def append(self, pick, layer, n):
        twin, pair = self.picked(pick), self.arrays(2, n)
        twin.session.update(layer, *pair)
        twin.append(layer, *pair)
        self.look()

    @precondition(lambda self: self.twins)
    @rule(pick=PICK, layer=LAYER, n=st.sampled_from([1, 1, 1, 3, 20]), asked=st.sampled_from([*ASKED]), times=st.integers(1, 30))
    def attend(self, pick, layer, n, asked, times):
        twin, (options, tolerance) = self.picked(pick), ASKED[asked]
        for _ in range(times if n == 1 else 1):
            q, pair = self.query(n), self.arrays(2, n)
            out = twin.session.attend(layer, q, *pair, options=options)
            twin.append(layer, *pair)
            self.check(twin, layer, q, out, tolerance)

    @precondition(lambda self: self.twins)
    @rule(layer=LAYER, asked=st.sampled_from([*ASKED]), times=st.integers(1, 5))
    def attend_together(self, layer, asked, times):
        options, tolerance = ASKED[asked]
        for _ in range(times):
            q, pairs = [self.query(1) for _ in self.twins], [self.arrays(2, 1) for _ in self.twins]
            k, v = (np.stack(part) for part in zip(*pairs, strict=True))
            out = self.db.attend([twin.session for twin in self.twins], layer, np.stack(q), k, v, options=options)
            for twin, own, pair, got in zip(self.twins, q, pairs, out, strict=True):
                twin.append(layer, *pair)
                self.check(twin, layer, own, got, tolerance)

    @precondition(lambda self: 0 < len(self.twins) < SESSIONS_MAX)
    @rule(pick=PICK)
    def fork(self, pick):
        twin = self.picked(pick)
        self.twins.append(Twin(twin.session.fork(), list(twin.held)))
        self.look()

    @precondition(lambda self: self.twins)
    @rule(pick=PICK, share=st.floats(0, 1))
    def truncate(self, pick, share):
        twin = self.picked(pick)
        tokens = int(share * max(twin.lengths))
        twin.session.truncate(tokens)
        twin.held = [(k[:, :tokens], v[:, :tokens]) for k, v in twin.held]
        self.look()

    @precondition(lambda self: self.twins and len(self.contexts) < 4)
    @rule(pick=PICK)
    def store(self, pick):
        twin = self.picked(pick)
        for layer, length in enumerate(twin.lengths):
            if missing := max(twin.lengths) - length:
                pair = self.arrays(2, missing)
                twin.session.update(layer, *pair)
                twin.append(layer, *pair)
        self.number += 1
        tokens = (np.arange(twin.lengths[0]) + 1000 * self.number).astype(np.int32)
        known = twin.session.tokens[: twin.lengths[0]]
        tokens[: len(known)] = known
        if len(tokens):
            twin.session.store(str(self.number), tokens=tokens)
            self.contexts[str(self.number)] = tokens, list(twin.held)
        self.look()

    @precondition(lambda self: self.contexts)
    @rule(pick=PICK)
    def drop(self, pick):
        name = sorted(self.contexts)[pick % len(self.contexts)]
        self.db.drop(name)
        del self.contexts[name]

    @precondition(lambda self: self.contexts)
    @rule(pick=PICK, kind=st.sampled_from(["flat", "quantized", "coarse-bounds"]))
    def finish_an_index(self, pick, kind):
        self.db.build_index(sorted(self.contexts)[pick % len(self.contexts)], kind)

    @precondition(lambda self: self.twins)
    @rule(pick=PICK)
    def withdraw_proofs(self, pick):
        for view in self.picked(pick).session._transport.views:
            view.segment.evidence.take()

    @precondition(lambda self: self.contexts)
    @rule(pick=PICK)
    def evict(self, pick):
        self.db.offload(sorted(self.contexts)[pick % len(self.contexts)])
        self.look()

    @precondition(lambda self: self.twins)
    @rule(pick=PICK, layer=LAYER)
    def read(self, pick, layer):
        twin = self.picked(pick)
        k, v = twin.session.read(layer, 0, min(twin.lengths))
        np.testing.assert_array_equal(k, twin.held[layer][0][:, : min(twin.lengths)])
        np.testing.assert_array_equal(v, twin.held[layer][1][:, : min(twin.lengths)])

    @precondition(lambda self: self.twins)
    @rule(pick=PICK)
    def count(self, pick):
        twin = self.picked(pick)
        assert twin.session.stats().tokens == min(twin.lengths)
        self.look()

    @precondition(lambda self: self.twins)
    @rule(pick=PICK)
    def close(self, pick):
        twin = self.picked(pick)
        twin.session.close()
        self.look()
        self.twins.remove(twin)

    def teardown(self):
        for twin in self.twins:
            twin.session.close()
        self.opened.__exit__(None, None, None)
        self.folder.cleanup()


TestSteps = StepMachine.TestCase
TestSteps.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_any_order_meets_every_state():
    run_state_machine_as_test(StepMachine, settings=settings(TestSteps.settings, max_examples=10))
    assert StepMachine.seen == {*LayerState}


def test_what_leads_from_one_state_to_the_next():
    rng = np.random.default_rng(0)
    one = [rng.standard_normal((heads, 1, 16)).astype(np.float32) for heads in (4, 2, 2)]
    config = Config(storage=StorageConfig(block_size=16, arena_bytes=1 << 20))
    with kvdb.connect(config=config) as db:
        held = rng.standard_normal((2, 2, 10, 16)).astype(np.float32)
        db.import_context(SPEC, np.arange(10), [tuple(held)] * 2, name="doc")
        session = db.create_session(SPEC, np.arange(10))
        layer = session._transport._layers[0]
        assert layer.state is LayerState.loading
        session.update(0, *one[1:])
        assert layer.state is LayerState.planned
        for _ in range(15):
            session.attend(0, *one)
            assert layer.state in {LayerState.running, LayerState.halted}
        assert layer.state is LayerState.halted  # its block is full
        session.attend(0, *one)
        assert layer.state is LayerState.running
        session.read(0)
        assert layer.state is LayerState.planned
        session.attend(0, *one)
        session.truncate(5)
        assert layer.state is LayerState.loading  # of what is left of the document
        session.close()
        assert layer.state is LayerState.closed
