"""Hints that cannot be are typed errors that name the choices, on both transports, and leave the session as it was."""

import pytest

import indexes.registry as registry
import kvdb
from kvdb.config import Config, OptimizerConfig
from kvdb.errors import ConfigError, InvalidArgument, LayerError, NotFound, Unsupported
from tests.query_optimizer.conftest import N

LEAST = (8 + 16) * 2 * 2 * 16 * 4
"""Bytes of the window's keys and values in one layer."""
WRONG = {
    "a rule that is none": (
        {"hints": kvdb.Hints(rules_off=("hinted", "none"))},
        r"rules_off: .*'none'; expected one of exact_asked",
    ),
    "the last rule": ({"hints": kvdb.Hints(rules_off=("no_index",))}, r"rules_off: .*'no_index'"),
    "a kind that is none": ({"hints": kvdb.Hints("tree")}, r"'tree'; expected one of flat, "),
    "a hint that nothing follows": ({"hints": kvdb.Hints("flat", ("hinted",))}, r"'hinted', which follows it"),
    "a budget below the window": ({"hints": kvdb.Hints(memory_budget=LEAST - 1)}, rf"below the window: .* take {LEAST:,} bytes"),
    "an index and exact": ({"hints": kvdb.Hints("flat"), "retrieval": kvdb.Exact()}, "exact attention reads everything"),
    "hints of another type": ({"hints": {"index": "flat"}}, r"expected kvdb.Hints\(index=, rules_off=, memory_budget=\)"),
    "a text": ({"hints": "flat"}, r"expected kvdb.Hints"),
}


@pytest.fixture(params=WRONG)
def wrong(request):
    return WRONG[request.param]


def test_every_call_refuses_them_and_the_session_is_as_it_was(document, wrong):
    options, message = wrong
    with document.open() as session:
        document.attend(session, 0, N)
        before = session.stats()
        for call in (
            lambda: document.attend(session, 0, N + 1, **options),
            lambda: session.attention(0, document.q[0][:, N : N + 1], **options),
            lambda: session.explain(0, **options),
            lambda: session.explain(0, analyze=True, **options),
            lambda: document.db.explain("doc", 0, **options),
        ):
            with pytest.raises(InvalidArgument, match=message):
                call()
        assert session.stats() == before
        document.attend(session, 0, N + 1, hints=kvdb.Hints(memory_budget=LEAST))
        assert session.stats().queries == before.queries + 1


def test_an_index_where_none_can_be(document):
    with document.open("short") as session:
        before = session.stats()
        with pytest.raises(InvalidArgument, match=r"no part of the layer can have an index .* expected index=None"):
            document.attend(session, 1, 30, hints=kvdb.Hints("flat"))
        assert session.stats() == before


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "1"])
def test_budgets_that_cannot_be(budget):
    with pytest.raises(ValueError, match="expected a positive number of bytes, or None"):
        kvdb.Hints(memory_budget=budget)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"rules_off": "hinted"}, "rules_off is 'hinted'; expected a tuple"),
        ({"rules_off": (1,)}, "rules_off is "),
        ({"rules_off": None}, "rules_off is None"),
        ({"index": 3}, "index is 3; expected the name"),
        ({"index": ["flat"]}, "index is "),
    ],
    ids=str,
)
def test_names_that_cannot_be(names, message):
    with pytest.raises(ValueError, match=message):
        kvdb.Hints(**names)


def test_a_list_of_names_and_any_budget_will_do(document):
    hints = kvdb.Hints(rules_off=["first_layers", "cheapest_scan"], memory_budget=1 << 70)
    with document.open() as session:
        document.attend(session, 0, N, hints=hints)
        assert session.explain(0, hints=hints, retrieval=kvdb.Dipr()).rule == "no_index"


def test_a_kind_whose_library_is_missing(document, monkeypatch):
    monkeypatch.setattr(registry, "missing_library", lambda kind: "hnswlib" if kind == "hnsw" else None)
    with document.open() as session:
        with pytest.raises(Unsupported, match=r"needs hnswlib, .*kvdb\[hnsw\].* choose one of flat, .*coarse-clusters"):
            document.attend(session, 0, N, hints=kvdb.Hints("hnsw"))
        document.attend(session, 0, N, hints=kvdb.Hints("flat"))
        assert session.stats().queries == 1


def test_rules_of_the_configuration():
    for names in (("none",), ("no_index",)):
        with pytest.raises(ConfigError, match=r"optimizer.rules_off: .* expected one of exact_asked"):
            kvdb.connect(config=Config(optimizer=OptimizerConfig(rules_off=names)))


def test_explain_of_what_is_not_there(document):
    with pytest.raises(NotFound, match="none"):
        document.db.explain("none")
    for layer in (2, -1):
        with pytest.raises(LayerError, match="expected 0 to 1"):
            document.db.explain("doc", layer)


def test_a_hint_and_an_estimate_go_together(document):
    """Also where another kind could make the estimate, and the one that was named cannot."""
    for kind in ("flat", "coarse-clusters"):
        document.db.build_index("doc", kind)
    with document.open() as session:
        document.attend(session, 0, N, hints=kvdb.Hints("flat"), estimate_tail=True)
        assert "Index Search using flat on" in str(session.explain(0, hints=kvdb.Hints("flat"), estimate_tail=True))
