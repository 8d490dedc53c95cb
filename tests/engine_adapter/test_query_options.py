"""What `generate` is asked for arrives at every step's query, through the adapter and the wire."""

import pytest

import kvdb
from kvdb.errors import InvalidArgument
from tests.database import database
from tests.engine_adapter.tiny import prompts

ASKED = {
    "retrieval": kvdb.TopK(4),
    "max_missed_mass": 0.5,
    "estimate_tail": True,
    "hints": kvdb.Hints(rules_off=("first_layers",)),
}


@pytest.fixture
def engine(witness):
    """A database that asks the witness first."""
    with database([witness]) as opened:
        yield opened


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("asked", [ASKED, {"error_max": 0.25}], ids=["literal", "budgeted"])
@pytest.mark.parametrize("by_keywords", [True, False], ids=["keywords", "options"])
def test_every_field_arrives(attached, witness, asked, by_keywords, rows):
    how = asked if by_keywords else {"options": kvdb.QueryOptions(**asked)}
    attached.generate(prompts(rows, 5), max_new_tokens=3, **how)
    assert witness.saw(kvdb.QueryOptions(**asked))


def test_both_together_are_refused(attached):
    with pytest.raises(InvalidArgument, match="options= and estimate_tail="):
        attached.generate(prompts(1, 5), options=kvdb.QueryOptions(), estimate_tail=True)
