"""What ended sessions asked proves ways while nobody steps."""

import subprocess
import sys
from contextlib import closing, suppress

import numpy as np
import pytest

import kvdb.indexing.background_time as background_time
import kvdb.session.audits as audits
from kvdb.errors import CapacityError
from kvdb.indexing.background_time import StepClock
from kvdb.session.late_proofs import WAITING_MAX
from kvdb.session.layer import Layer
from query_optimizer.order_statistics import AUDITS_MIN
from tests.database import database, searching_config
from tests.kvdb.session.test_audits import BUDGET, IDS, SPEC, Document

SECONDS = 60


@pytest.fixture
def engine(monkeypatch):
    """Nothing is compared beside steps."""
    monkeypatch.setattr(background_time, "SHARE", 0.0)
    monkeypatch.setattr(audits, "WORTH_SHARE", 0.0)
    monkeypatch.setattr(audits, "time_share", lambda shadow_ns, exact_ns: 0.2)
    with database(config=searching_config()) as opened:
        yield opened


def ask(engine, queries, salt=0, values=0.1):
    """Steps of a session that ends; the ways that answered them. values: how large those of its own tokens are."""
    rng = np.random.default_rng(salt)
    with closing(engine.create_session(SPEC, IDS)) as session:
        for q in queries:
            k, v = (0.1 * rng.standard_normal((2, 2, 1, SPEC.head_dim))).astype(np.float32)
            v *= values / 0.1
            session.attend(0, q, k, v, BUDGET)
        return set(session.stats().ways)


def test_the_next_session_searches_from_its_first_step(engine):
    document = Document(engine)
    assert ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 5)]) == {"exact"}
    assert engine._components.prover.wait(SECONDS)
    assert "flat dipr(0.012)" in ask(engine, [document.sharp() for _ in range(3)])


def test_all_of_the_queries_see_what_their_exact_answers_saw(engine):
    """Whatever each sees of the session's own tokens, which weigh the most here."""
    document = Document(engine)
    ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 20)], values=1e10)
    assert engine._components.prover.wait(SECONDS)
    (known,) = (
        one for way, one in engine._catalog.get("doc").views[0].segment.evidence.of(0).items() if str(way) == "flat dipr(0.012)"
    )
    assert (known.audits >= AUDITS_MIN).all()
    assert (known.largest < 0.02).all()


def test_few_queries_prove_nothing_and_add_up(engine):
    document, ways = Document(engine), []
    for _ in range(6):
        ways.append(ask(engine, [document.sharp() for _ in range(20)]))
        assert engine._components.prover.wait(SECONDS)
    assert ways[:3] == 3 * [{"exact"}], "60 queries would do, and not every one is kept"
    assert ways[-1] != {"exact"}


def test_a_way_that_errs_is_not_proven(engine):
    """Flat queries want everything, which no search finds."""
    document = Document(engine)
    for _ in range(2):
        ask(engine, [document.flat() for _ in range(AUDITS_MIN + 5)])
        assert engine._components.prover.wait(SECONDS)
    assert ask(engine, [document.flat() for _ in range(5)]) == {"exact"}


def test_it_waits_while_sessions_step(engine):
    document, now = Document(engine), [0.0]
    clock = StepClock(engine._services.background_time, 1, lambda: now[0])
    clock.look(1)
    now[0] += 10
    clock.look(1)  # for ten seconds, a session is taken to step
    ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 5)])
    assert not engine._components.prover.wait(0.3)
    clock.close()
    assert engine._components.prover.wait(SECONDS)
    assert ask(engine, [document.sharp()]) != {"exact"}


def test_a_context_that_is_dropped_gives_its_memory_back(engine):
    document = Document(engine)
    clock = StepClock(engine._services.background_time, 1)
    clock.account.stepped(clock, 1.0, 10.0)
    ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 5)])
    before = engine._blocks.used_nbytes()
    engine.drop("doc")
    assert engine._blocks.used_nbytes() < 0.05 * before, "only what the session had added"
    clock.close()
    assert engine._components.prover.wait(SECONDS)
    assert engine._blocks.used_nbytes() == 0


def test_closing_the_database_ends_it(engine):
    document = Document(engine)
    clock = StepClock(engine._services.background_time, 1)
    clock.account.stepped(clock, 1.0, 10.0)
    ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 5)])
    engine.close()
    assert engine._components.prover.wait(SECONDS)


FORGETFUL = """
import numpy as np, kvdb, kvdb.session.audits as audits
audits.WORTH_SHARE = 0.0
spec = kvdb.ModelSpec("m", layers=1, q_heads=2, kv_heads=2, head_dim=32, dtype="float32")
ones, db = np.ones((2, 5000, 32), np.float32), kvdb.connect()
db.import_context(spec, np.arange(5000), [(ones, ones)], name="a")
session = db.create_session(spec, np.arange(5000))
for _ in range(60):
    session.attend(0, ones[:, :1], ones[:, :1], ones[:, :1])
session.close()
db._transport._components.prover._built = lambda: False  # as while an index is built
print("waits", bool(db._transport._components.prover._waiting))
"""


def test_a_process_ends_that_closes_no_database():
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "waits True\n", done.stderr


def test_whoever_lacks_memory_gets_that_of_what_waits(engine):
    document = Document(engine)
    clock = StepClock(engine._services.background_time, 1)
    clock.account.stepped(clock, 1.0, 10.0)
    before = engine._blocks.used_nbytes()
    ask(engine, [document.sharp() for _ in range(AUDITS_MIN + 5)])
    assert engine._blocks.used_nbytes() > before
    budget = engine._blocks.budget
    budget.limit = budget._taken
    with suppress(CapacityError):
        budget.check(1)
    assert engine._blocks.used_nbytes() == before
    clock.close()
    assert engine._components.prover.wait(SECONDS)


def test_the_oldest_of_many_is_forgotten(engine, monkeypatch):
    document, asked = Document(engine), []
    monkeypatch.setattr(Layer, "prove", lambda layer, *_: asked.append(layer.tail.length))
    clock = StepClock(engine._services.background_time, 1)
    clock.account.stepped(clock, 1.0, 10.0)
    for number in range(WAITING_MAX + 2):
        ask(engine, [document.sharp() for _ in range(20 + number)])
    clock.close()
    assert engine._components.prover.wait(SECONDS)
    assert asked == [20 + number for number in range(2, WAITING_MAX + 2)]
