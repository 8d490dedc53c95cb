"""Indexes that are built in the background: what comes first, what is said of it, and how it ends."""

import logging
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

import indexes.registry as registry
import kvdb
from indexes.base import BuildCost
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, OptimizerConfig, ServerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from kvdb.errors import CapacityError, Unavailable, Unsupported
from kvdb.indexing.build_costs import BuildCosts
from kvdb.indexing.builder import IndexBuilder
from kvdb.server.serve import Server
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.loader import Loader
from tests.racing import switching
from tests.scan import Scan

TOKENS, SECONDS_MAX = 300, 20
STEPS = 4


class Gate:
    """Lets builds take their steps one by one, and notes them: (kind, layer's number of the build, step)."""

    def __init__(self):
        self.seen = []
        self._free = threading.Semaphore(0)
        self._opened = False
        self._arrived = threading.Semaphore(0)

    def arrive(self, what):
        self.seen.append(what)
        self._arrived.release()
        assert self._opened or self._free.acquire(timeout=SECONDS_MAX)

    def wait(self, steps=1):
        """Until so many more steps were begun."""
        for _ in range(steps):
            assert self._arrived.acquire(timeout=SECONDS_MAX)

    def let(self, steps=1):
        """So many steps go on, each when it was begun."""
        for _ in range(steps):
            self._free.release()

    def open(self):
        """Everything goes on."""
        self._opened = True
        self._free.release(10)


@dataclass
class Slow(Scan):
    """Takes STEPS steps a layer, each when the gate lets it. closed: builds that were ended in between."""

    kind: ClassVar[str] = "slow"
    gate: ClassVar[Gate]
    closed: ClassVar[list[str]]
    seconds: ClassVar[float] = 100.0

    @classmethod
    def build_steps(cls, blocks, query_samples=None):
        try:
            for step in range(STEPS):
                cls.gate.arrive((cls.kind, step))
                yield (step + 1) / STEPS
        except GeneratorExit:
            cls.closed.append(cls.kind)
            raise
        return cls(blocks, query_samples)

    @classmethod
    def build_cost(cls, tokens, kv_heads, head_dim):
        return BuildCost(cls.seconds, float(tokens), 0.01)


@dataclass
class Quick(Slow):
    kind: ClassVar[str] = "quick"
    seconds: ClassVar[float] = 1.0


@dataclass
class Broken(Scan):
    kind: ClassVar[str] = "broken"
    attempts: ClassVar[int] = 0

    @classmethod
    def build(cls, blocks, query_samples=None):
        Broken.attempts += 1
        raise ArithmeticError("nine is prime")


@pytest.fixture
def gate(monkeypatch):
    """The kinds slow, quick and broken beside flat, for which Scan stands."""
    Slow.gate = gate = Gate()
    Slow.closed, Broken.attempts = [], 0
    monkeypatch.setattr(registry, "KINDS", {"flat": Scan, "slow": Slow, "quick": Quick, "broken": Broken})
    yield gate
    gate.open()


CONFIG = Config(
    storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
    optimizer=OptimizerConfig(short_context_tokens=64),
    window=WindowConfig(8, 16),
    indexes=IndexConfig(on_demand="", segment_tokens_min=64, automatic=False),
)


def configured(**indexes):
    return replace(CONFIG, indexes=replace(CONFIG.indexes, **indexes))


@pytest.fixture
def engine(gate):
    """A database in which everything is small; without indexes of its own accord."""
    database = Database(CONFIG)
    yield database
    gate.open()
    database.close()


def load(engine, kv, name="doc"):
    writing = engine.begin_import(kv.spec, kv.tokens, name)
    for layer, (k, v) in enumerate(kv.pairs()):
        writing.write(layer, k, v)
    return writing.commit()


@pytest.fixture
def document(engine, spec, make_kv):
    kv = make_kv(spec, TOKENS)
    load(engine, kv)
    return kv


def segment_of(engine, kv):
    """The segment of what is stored of these tokens."""
    with closing(engine.create_session(kv.spec, kv.tokens)) as session:
        return session.views[0].segment


def settled(engine):
    """Wait until nothing is being built."""
    assert engine.wait_for_builds(SECONDS_MAX)


def of(engine, kind, name="doc"):
    """What is said of one kind."""
    return next((info for info in engine.indexes(name) if info.kind == kind), None)


def test_a_cheap_kind_overtakes_a_dear_one_between_its_steps(engine, document, gate):
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    engine.build_index("doc", "quick", wait=False)
    gate.open()
    settled(engine)
    assert [of(engine, kind).state for kind in ("slow", "quick")] == ["ready", "ready"]
    kinds = [kind for kind, _ in gate.seen]
    assert kinds == ["slow"] + 2 * STEPS * ["quick"] + (2 * STEPS - 1) * ["slow"]


@pytest.fixture
def builder(gate):
    """A builder of one thread; of the segments of `engine`, which has another that stays idle."""
    with closing(Loader(BufferPool(CpuBudget(None)))) as loader:
        builder = IndexBuilder(loader, threads=1)
        yield builder
        gate.open()
        builder.close()


def test_what_is_requested_comes_before_what_would_pay(engine, builder, document, gate):
    segment = segment_of(engine, document)
    (slow,) = builder.request([segment], "slow")
    gate.wait()
    builder.schedule(segment, "quick")
    gate.let(STEPS)
    gate.wait(STEPS)
    assert {kind for kind, _ in gate.seen} == {"slow"}
    assert of(engine, "quick").state == "waiting"
    builder.request([segment], "quick")  # now it is requested, and cheaper
    gate.open()
    slow.result(SECONDS_MAX)
    assert [kind for kind, _ in gate.seen][STEPS + 1 :] == 2 * STEPS * ["quick"] + (STEPS - 1) * ["slow"]


def test_progress_grows_by_steps_and_says_how_long(engine, document, gate):
    engine.build_index("doc", "slow", wait=False)
    seen = []
    for step in range(2 * STEPS):
        gate.wait()
        seen.append(of(engine, "slow"))
        assert (seen[-1].state, seen[-1].layers, seen[-1].layers_total) == ("building", step // STEPS, 2)
        gate.let()
    settled(engine)
    done = of(engine, "slow")
    assert done.state == "ready"
    assert [info.progress for info in seen] == [step / (2 * STEPS) for step in range(2 * STEPS)]
    assert (done.progress, done.layers, done.error) == (1.0, 2, "")
    assert 0 < done.seconds == done.seconds_expected
    assert seen[0].seconds_expected == pytest.approx(200, rel=0.01)  # as the kind says, before it was measured
    assert seen[STEPS].seconds < seen[STEPS].seconds_expected < 20  # corrected by the first layer


def test_a_database_closes_after_the_step_under_way_and_leaves_nothing(gate, spec, make_kv):
    """Whoever waits for a build that has not begun is told at once; then the step under way may end."""
    engine, kv, errors = Database(CONFIG), make_kv(spec, TOKENS), []
    load(engine, kv)
    segment = segment_of(engine, kv)
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    waits = threading.Event()

    def wait_for_the_next():
        errors.append(raised(engine.build_index, "doc", "quick", True, lambda: waits.set() or True))
        gate.let()

    waiting = threading.Thread(target=wait_for_the_next)
    waiting.start()
    assert waits.wait(SECONDS_MAX)
    engine.close()
    waiting.join(SECONDS_MAX)
    assert gate.seen == [("slow", 0)]
    assert Slow.closed == ["slow"]
    assert [type(error) for error in errors] == [Unavailable]
    assert segment.references == 1
    assert segment.indexes.progress == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-index")]


def raised(call, *arguments):
    with pytest.raises(kvdb.KvdbError) as caught:
        call(*arguments)
    return caught.value


def test_what_nobody_holds_any_more_is_given_up(engine, document, gate):
    segment = segment_of(engine, document)
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    engine.drop("doc")
    gate.let()
    settled(engine)
    assert segment.references == 0
    assert len(gate.seen) == 1
    assert engine.tiers()[0].blocks_used == 0


def test_builds_that_wait_keep_no_dropped_context_alive(engine, document, gate, spec, make_kv):
    """Nor does one that has begun and lets others go first, once a step has ended."""
    blocks = engine.tiers()[0].blocks_used
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    for number in range(5):
        load(engine, make_kv(spec, TOKENS, seed=number + 1), f"waits {number}")
        engine.build_index(f"waits {number}", "quick", wait=False)
    for number in range(5):
        engine.drop(f"waits {number}")
        assert engine.tiers()[0].blocks_used == (5 - number) * blocks
        engine.check_integrity()
    engine.drop("doc")
    assert engine.tiers()[0].blocks_used == blocks  # of the step under way
    engine.check_integrity()
    gate.let()
    settled(engine)
    assert engine.tiers()[0].blocks_used == 0
    assert len(gate.seen) == 1


def test_the_books_are_right_while_somebody_waits_for_builds_over_a_dropped_context(engine, document, gate):
    waits = threading.Event()
    waiting = threading.Thread(target=lambda: engine.build_index("doc", "slow", True, lambda: waits.set() or True))
    waiting.start()
    gate.wait()
    assert waits.wait(SECONDS_MAX)
    engine.drop("doc")
    engine.check_integrity()
    gate.open()
    waiting.join(SECONDS_MAX)
    assert len(gate.seen) == 2 * STEPS  # whoever waits holds the segment
    assert engine.wait_for_builds(SECONDS_MAX)
    assert engine.tiers()[0].blocks_used == 0
    engine.check_integrity()


def test_a_build_that_was_overtaken_is_given_up_when_its_context_is_dropped(engine, document, gate, spec, make_kv):
    other = make_kv(spec, TOKENS, seed=1)
    load(engine, other, "other")
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    engine.build_index("other", "quick", wait=False)
    gate.let()
    gate.wait()  # the first step of what overtakes
    engine.drop("doc")
    engine.check_integrity()
    gate.let()
    gate.wait()
    assert Slow.closed == ["slow"]
    assert engine.tiers()[0].blocks_used == sum(info.layers_total for info in engine.indexes("other")) * -(-TOKENS // 16)
    gate.open()
    settled(engine)
    assert of(engine, "quick", "other").state == "ready"


def test_nothing_is_built_over_what_is_freed(engine, builder, document, gate):
    """As when a context is dropped right after it was stored, before its indexes are scheduled."""
    segment = segment_of(engine, document)
    engine.drop("doc")
    builder.schedule(segment, "slow")
    (build,) = builder.request([segment], "slow")
    with pytest.raises(Unavailable, match="nobody holds the segment"):
        build.result(SECONDS_MAX)
    assert gate.seen == []
    assert builder.wait(SECONDS_MAX)


def test_a_build_goes_on_for_a_session_whose_context_was_dropped(engine, document, gate):
    session = engine.create_session(document.spec, document.tokens)
    segment = session.views[0].segment
    engine.build_index("doc", "slow", wait=False)
    gate.wait()
    engine.drop("doc")
    gate.open()
    settled(engine)
    assert len(segment.indexes.built()["slow"]) == 2
    session.close()
    assert segment.references == 0


def test_a_build_that_raises_is_logged_once_said_and_not_begun_again(engine, builder, document, caplog):
    segment = segment_of(engine, document)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            builder.schedule(segment, "broken")
            assert builder.wait(SECONDS_MAX)
    failed = of(engine, "broken")
    assert (failed.state, failed.error) == ("failed", "ArithmeticError: nine is prime")
    assert (failed.layers, failed.nbytes) == (0, 0)
    assert Broken.attempts == 1
    assert [record.getMessage() for record in caplog.records] == [f"index broken of segment {segment.number} cannot be built"]
    with pytest.raises(ArithmeticError, match="nine"):  # who asks is told, and it is tried again
        engine.build_index("doc", "broken")
    assert Broken.attempts == 2
    assert segment.references == 1


def test_a_kind_whose_library_is_missing_is_unsupported(engine, document, monkeypatch):
    def build(blocks, query_samples=None):
        raise ModuleNotFoundError("no such thing", name="sesame")

    monkeypatch.setattr(Broken, "build", build)
    with pytest.raises(Unsupported, match="needs sesame"):
        engine.build_index("doc", "broken")
    assert of(engine, "broken").error.startswith("an index of the kind 'broken' needs sesame")


def test_no_more_is_kept_than_the_configuration_allows(gate, spec, make_kv):
    gate.open()
    with Database(configured(bytes_max=5 * TOKENS, at_store=("quick",))) as engine:
        load(engine, make_kv(spec, TOKENS))
        settled(engine)
        assert of(engine, "quick").state == "ready"
        engine.build_index("doc", "slow")  # 2 layers of TOKENS bytes each, and 2 of quick
        load(engine, make_kv(spec, TOKENS, seed=1), "other")
        with pytest.raises(CapacityError, match=r"kind 'slow' would keep about 600 bytes beside the 1,200 .* at most 1,500"):
            engine.build_index("other", "slow")
        assert engine.indexes("other") == []  # nor was it built when it was stored
        engine.drop("doc")
        engine.build_index("other", "slow")


def test_builds_that_wait_are_counted_against_the_budget(gate, spec, make_kv):
    with Database(configured(bytes_max=3 * TOKENS)) as engine:
        load(engine, make_kv(spec, TOKENS))
        engine.build_index("doc", "slow", wait=False)
        with pytest.raises(CapacityError, match="about 600 bytes beside the 600 of other indexes"):
            engine.build_index("doc", "quick", wait=False)
        engine.build_index("doc", "slow", wait=False)  # is under way already
        gate.open()


def test_what_indexes_keep_is_counted_while_others_store_and_drop(engine, builder, gate, spec, make_kv):
    gate.open()
    wrong, end = [], threading.Event()

    def count():
        try:
            while not end.is_set():
                assert builder.nbytes() >= 0
        except RuntimeError as error:
            wrong.append(error)

    counting = [threading.Thread(target=count) for _ in range(2)]
    try:
        with switching():
            for thread in counting:
                thread.start()
            for number in range(60):
                kv = make_kv(spec, 64, seed=number)
                kv.tokens[0] = 1000 + number  # so that none begins as another does
                load(engine, kv, str(number))
                builder.schedule(segment_of(engine, kv), "quick")
                if number >= 10:
                    engine.drop(str(number - 10))
    finally:
        end.set()
        for thread in counting:
            thread.join(SECONDS_MAX)
    assert not wrong
    assert builder.wait(SECONDS_MAX)
    assert builder.nbytes() == 10 * 2 * 64
    for number in range(50, 60):
        engine.drop(str(number))
    assert builder.nbytes() == 0


@pytest.mark.parametrize("remote", [False, True])
def test_progress_is_said_over_either_transport(engine, document, gate, remote):
    server = Server(engine, ServerConfig(port=0))
    server.start()
    try:
        with kvdb.connect(server.target) if remote else Client(engine) as db:
            db.build_index("doc", "slow", wait=False)
            gate.let()
            gate.wait(2)
            (info,) = db.indexes("doc")
            assert (info.state, info.progress, info.layers) == ("building", 0.125, 0)
            assert info == engine.indexes("doc")[0]
            db.build_index("doc", "broken", wait=False)
            gate.open()
            settled(engine)
            assert [info.state for info in db.indexes("doc")] == ["ready", "failed"]
            assert db.indexes("doc") == engine.indexes("doc")
            assert db.indexes("doc")[1].error == "ArithmeticError: nine is prime"
    finally:
        server.stop(grace=0)


def test_builds_give_way_to_queries(engine, document, gate, monkeypatch):
    import os

    seen = []

    def build(blocks, query_samples=None):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return Scan(blocks, query_samples)

    monkeypatch.setattr(Broken, "build", build)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    engine.build_index("doc", "broken")
    assert seen == 2 * [min(before + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_expectations_follow_what_builds_took(engine, document, gate):
    segment, costs = segment_of(engine, document), BuildCosts()
    assert costs.of("slow", segment).seconds == 100
    costs.learn("slow", segment, 50)
    assert costs.of("slow", segment).seconds == 50
    costs.learn("slow", segment, 100)
    assert costs.of("slow", segment).seconds == pytest.approx(65)
    for _ in range(100):
        costs.learn("slow", segment, 1e9)
    assert costs.of("slow", segment).seconds == pytest.approx(1600)  # however wrong a measurement is
    assert costs.of("broken", segment).seconds > 0  # of a kind that does not say


@pytest.mark.parametrize("kind", ["flat", "quantized", "coarse-bounds", "coarse-means", "coarse-clusters", "hnsw"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kinds_keep_about_what_they_say(kind, head_dim):
    from indexes.blocks import Blocks

    k = np.random.default_rng(0).standard_normal((2, 4096, head_dim)).astype(np.float32)
    index = registry.build(kind, Blocks.of(k, k))
    assert registry.build_cost(kind, 4096, 2, head_dim).nbytes == pytest.approx(index.nbytes, rel=0.1)
