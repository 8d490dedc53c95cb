"""What a query asks for arrives whole, however it is said, embedded and remote."""

import re

import numpy as np
import pytest

import kvdb
from kvdb.errors import InvalidArgument
from tests.database import database

FIELDS = {
    "retrieval": kvdb.Dipr(0.5),
    "max_missed_mass": 0.25,
    "estimate_tail": True,
    "hints": kvdb.Hints(rules_off=("first_layers",), memory_budget=1 << 30),
}
BUDGET = {"error_max": 0.25, "hints": kvdb.Hints(rules_off=("first_layers",))}
WAYS = {
    "options": lambda fields: {"options": kvdb.QueryOptions(**fields)},
    "keywords": dict,
}


@pytest.fixture
def engine(witness):
    """A database that asks the witness first."""
    with database([witness]) as opened:
        yield opened


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.fixture
def calls(db, spec):
    """Every call that takes what a query asks for, each in a session of its own, whose plans nobody has made yet."""
    kv = [(ones(2, 3, 16), ones(2, 3, 16))] * 2
    db.import_context(spec, [1, 2, 3], kv, name="doc")
    opened = []

    def session():
        opened.append(db.create_session(spec, [1, 2, 3]))
        return opened[-1]

    one, several = (ones(2, 1, 16), ones(2, 1, 16)), (ones(1, 2, 1, 16), ones(1, 2, 1, 16))
    yield {
        "attend": lambda **asked: session().attend(0, ones(4, 1, 16), *one, **asked),
        "attention": lambda **asked: session().attention(0, ones(4, 1, 16), **asked),
        "explain": lambda **asked: session().explain(0, **asked),
        "attend together": lambda **asked: db.attend([session()], 0, ones(1, 4, 1, 16), *several, **asked),
        "attention together": lambda **asked: db.attention([session()], 0, ones(1, 4, 1, 16), **asked),
        "explain a context": lambda **asked: db.explain("doc", **asked),
    }
    for used in opened:
        used.close()


@pytest.mark.parametrize("fields", [FIELDS, BUDGET], ids=["literal", "budgeted"])
@pytest.mark.parametrize("way", WAYS)
def test_every_field_arrives(calls, witness, way, fields):
    for name, call in calls.items():
        call(**WAYS[way](fields))
        assert witness.saw(kvdb.QueryOptions(**fields)), name


def test_nothing_asked_for_leaves_it_to_the_optimizer(calls, witness):
    for name, call in calls.items():
        call()
        assert witness.saw(kvdb.QueryOptions()), name


def test_options_and_keywords_together_are_refused(calls, witness):
    for call in calls.values():
        with pytest.raises(InvalidArgument, match="options= and estimate_tail="):
            call(options=kvdb.QueryOptions(), estimate_tail=True)
        with pytest.raises(InvalidArgument, match="expected kvdb.QueryOptions"):
            call(options={"estimate_tail": True})
    assert not witness.seen


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "retrieval": [kvdb.Dipr, "exact", 5],
        "max_missed_mass": [0, 1.5, float("nan"), "all", True, [0.5]],
        "hints": ["flat", {"index": "flat"}],
        "error_max": [-0.01, 1.01, float("nan"), float("inf"), "exact", True, [0.5], 1j],
    }.items(),
)
def test_values_that_cannot_be_are_errors_of_ours(calls, field, values):
    for value in values:
        with pytest.raises(InvalidArgument, match=field):
            kvdb.QueryOptions(**{field: value})
        for call in calls.values():
            with pytest.raises(InvalidArgument, match=field):
                call(**{field: value})


@pytest.mark.parametrize(
    "make",
    [
        kvdb.Dipr,
        kvdb.TopK,
        kvdb.TopP,
        lambda value: kvdb.Hints(memory_budget=value),
    ],
    ids=["Dipr", "TopK", "TopP", "Hints"],
)
@pytest.mark.parametrize("value", [0, -1, float("nan"), "1", True, [1], 1j])
def test_a_retrieval_that_cannot_be_is_an_error_of_ours(make, value):
    with pytest.raises(kvdb.KvdbError, match="expected"):
        make(value)


def test_no_hints_are_none():
    assert kvdb.QueryOptions(hints=None) == kvdb.QueryOptions()
    assert kvdb.QueryOptions(max_missed_mass=np.float32(0.5)).max_missed_mass == 0.5
    assert kvdb.QueryOptions(error_max=np.float32(0.5)).error_max == 0.5
    assert [kvdb.QueryOptions(error_max=bound).error_max for bound in (0, 1)] == [0.0, 1.0]


OVERRIDING = {
    "retrieval=exact.* would win: its error is 0": {"retrieval": kvdb.Exact()},
    r"retrieval=dipr\(0.5\).* would win: what a retrieval names is what is read": {"retrieval": kvdb.Dipr(0.5)},
    r"retrieval=top_k\(4\).* would win": {"retrieval": kvdb.TopK(4)},
    r"retrieval=top_p\(0.5\).* would win": {"retrieval": kvdb.TopP(0.5)},
    "max_missed_mass=0.25.* would win: it is a bound": {"max_missed_mass": 0.25},
    "estimate_tail=True.* would win": {"estimate_tail": True},
}


@pytest.mark.parametrize("error_max", [0.0, 0.02])
@pytest.mark.parametrize("message", OVERRIDING)
def test_an_error_max_beside_what_would_override_it_is_refused(calls, witness, message, error_max):
    other = OVERRIDING[message]
    with pytest.raises(InvalidArgument, match=f"error_max is {error_max:g} beside {message}"):
        kvdb.QueryOptions(error_max=error_max, **other)
    for call in calls.values():
        with pytest.raises(InvalidArgument, match=f"beside {message}.*expected one of the two"):
            call(error_max=error_max, **other)
    assert not witness.seen


def test_who_is_budgeted():
    assert kvdb.QueryOptions().budgeted
    assert kvdb.QueryOptions(error_max=0, hints=kvdb.Hints("flat")).budgeted
    for other in OVERRIDING.values():
        literal = kvdb.QueryOptions(**other)
        assert not literal.budgeted
        assert literal.with_default(0.5) is literal


@pytest.mark.parametrize(("wrong", "meant"), [("retreival", "retrieval"), ("error_mx", "error_max"), ("hint", "hints")])
def test_a_misspelt_keyword_is_told_with_the_nearest(calls, wrong, meant):
    for call in calls.values():
        with pytest.raises(InvalidArgument, match=f"no keyword {wrong}=; .*did you mean {meant}="):
            call(**{wrong: None})


def test_a_misspelt_keyword_of_a_new_context_is_told_with_the_nearest(db, spec):
    kv = [(ones(2, 3, 16), ones(2, 3, 16))] * 2
    with pytest.raises(InvalidArgument, match="no keyword pined=; .*did you mean pinned="):
        db.import_context(spec, [1, 2, 3], kv, name="doc", pined=True)
    with db.create_session(spec, [1, 2, 3]) as session, pytest.raises(InvalidArgument, match="no keyword zzz=; expected some of"):
        session.store("doc", zzz=1)
    assert not db.contexts()


def test_a_session_says_what_it_is(db, spec):
    kv = [(ones(2, 3, 16), ones(2, 3, 16))] * 2
    db.import_context(spec, [1, 2, 3], kv, name="doc")
    with db.create_session(spec, [1, 2, 3, 4]) as session:
        said = repr(session)
    assert said == repr(session), "also once it is closed"
    assert re.fullmatch(rf"<Session of {spec.name} (in this process|on kvdb.*): prompt of 4 tokens, 3 of them reused>", said)
