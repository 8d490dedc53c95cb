"""A rule and a kind of index from outside the packages, each in under ten lines; docs/internals/extending.md shows them."""

import inspect
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

import indexes.registry as registry
import kvdb
from indexes.flat import Flat
from indexes.registry import NoKind, register
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig
from kvdb.errors import ConfigError, InvalidArgument
from query_optimizer.rules import Fired
from tests.reference import attention, relative_error

GUIDE = Path(__file__).parents[2] / "docs" / "internals" / "extending.md"
CONFIG = Config(
    storage=StorageConfig(arena_bytes=1 << 20),
    indexes=IndexConfig(on_demand="", segment_tokens_min=100),
    optimizer=OptimizerConfig(short_context_tokens=64, rules_off=("short_context",)),
)
N = 1500


class QuietNights:
    name, before = "quiet_nights", "error_budget"

    def when(self, facts, part, heads):
        if facts.layer % 2:
            return f"layer {facts.layer} is odd"
        return Fired()


class Counting(Flat):
    kind = "counting"
    asked = 0

    def search(self, queries, retrieval, **options):
        Counting.asked += queries.rows
        return super().search(queries, retrieval, **options)


@pytest.fixture
def kinds(monkeypatch):
    """Kinds of index that a test registers are forgotten at its end."""
    monkeypatch.setattr(registry, "KINDS", registry.Kinds(registry.KINDS.values()))


@pytest.fixture
def kv(spec, make_kv):
    return make_kv(spec, N + 1)


def load(db, kv):
    db.import_context(kv.spec, kv.tokens[:N], kv.pairs(0, N), name="doc")


def step(session, kv, layer, **options):
    k, v = kv.pairs(N)[layer]
    q = kv.q[layer][:, N:] * 8
    out = session.attend(layer, q, k, v, **options)
    exact, _ = attention(q, kv.k[layer], kv.v[layer], kv.spec.softmax_scale)
    return relative_error(out, exact)


def test_a_rule_from_outside_decides_is_explained_and_can_be_switched_off(kv):
    with kvdb.connect(config=CONFIG, rules=[QuietNights()]) as db:
        load(db, kv)
        db.build_index("doc", "flat")
        with db.create_session(kv.spec, kv.tokens[:N]) as session:
            assert step(session, kv, 0) <= 1e-5
            assert session.explain(0).rule == "quiet_nights"
            assert re.search("quiet_nights +layer 1 is odd", session.explain(1).explain(verbose=True))
            assert session.explain(0, hints=kvdb.Hints(rules_off=("quiet_nights",))).rule == "error_budget"


def test_a_kind_from_outside_is_built_searched_and_verified(kinds, kv):
    register(Counting)
    register(Counting)
    with kvdb.connect(config=CONFIG) as db:
        load(db, kv)
        assert [info.kind for info in db.build_index("doc", "counting")] == ["counting"]
        assert db.verify("doc").indexes == 2
        with db.create_session(kv.spec, kv.tokens[:N]) as session:
            before = Counting.asked
            assert step(session, kv, 1, hints=kvdb.Hints(index="counting")) <= 0.1
            assert Counting.asked > before
            assert "Index Search using counting on" in str(session.explain(1, hints=kvdb.Hints(index="counting")))


@pytest.mark.parametrize("name", ["QuietNights", "Counting"])
def test_the_guide_shows_what_is_tested_and_it_is_short(name):
    source = inspect.getsource(globals()[name])
    code = next(code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if f"class {name}" in code)
    assert textwrap.dedent(source) in code
    assert len([line for line in code.splitlines() if line]) < 10


def rule(name="mine", before="error_budget", when=lambda facts, part, heads: "no"):
    return type("Mine", (), {"name": name, "before": before, "when": staticmethod(when)})()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([rule("hinted")], "two rules are named 'hinted'"),
        ([rule(), rule()], "two rules are named 'mine'"),
        ([rule(before="nothing")], "stands before 'nothing', which is none; expected one of exact_asked"),
        ([rule(before=None)], "stands before None"),
        ([rule("")], "is no rule"),
        ([object()], "is no rule; expected a name, before and when"),
    ],
    ids=["taken", "twice", "no place", "None", "no name", "an object"],
)
def test_rules_that_cannot_be_added(rules, message):
    with pytest.raises(InvalidArgument, match=message):
        kvdb.connect(config=CONFIG, rules=rules)


def test_a_rule_from_outside_can_be_switched_off_by_the_configuration():
    with kvdb.connect(config=Config(optimizer=OptimizerConfig(rules_off=("mine",))), rules=[rule()]):
        pass
    with pytest.raises(ConfigError, match=r"optimizer.rules_off: .* 'mine'"):
        kvdb.connect(config=Config(optimizer=OptimizerConfig(rules_off=("mine",))))
    with pytest.raises(InvalidArgument, match="start the server with them"):
        kvdb.connect("kvdb://127.0.0.1:1", rules=[rule()])


@pytest.mark.parametrize(
    "verdict", [Fired("hnsw"), Fired(heads=()), Fired(heads=(7,)), Fired("flat", heads=(0, 9)), None, 3], ids=str
)
def test_a_verdict_that_cannot_be_is_a_refusal_and_the_query_is_answered(kv, verdict):
    with kvdb.connect(config=CONFIG, rules=[rule(when=lambda *_: verdict)]) as db:
        load(db, kv)
        db.build_index("doc", "flat")
        with db.create_session(kv.spec, kv.tokens[:N]) as session:
            assert step(session, kv, 0, retrieval=kvdb.Exact()) <= 1e-5
            assert session.explain(0).rule == "error_budget"
            assert re.search("mine +it (chose|answered)", session.explain(0).explain(verbose=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"kind": "flat"}, "named 'flat' already"), ({"kind": 3}, "lacks kind"), ({"walks": None}, "lacks walks")],
    ids=["taken", "no text", "no flag"],
)
def test_kinds_that_cannot_be_registered(kinds, changed, message):
    with pytest.raises(NoKind, match=message):
        register(type("Other", (Flat,), {"kind": "other", **changed}))
    with pytest.raises(NoKind, match=r"lacks kind, walks, estimates_tail, build, insert, search, verify, save, load"):
        register(object)
    assert "other" not in registry.KINDS


def test_the_kinds_change_by_registering_alone():
    with pytest.raises(TypeError):
        registry.KINDS["mine"] = Flat
    assert np.all([kind == cls.kind for kind, cls in registry.KINDS.items()])
