"""What the suite proves of every database that a test opens, see `tests/integrity.py`."""

import pytest

import kvdb
from kvdb.database import Database
from tests.stores import SPEC, TOKENS_MAX, config, put


@pytest.fixture
def broken():
    """A client of a database in which a block has more references than owners."""
    client = kvdb.connect(config=config(block_size=8))
    put(client, range(TOKENS_MAX), "text")
    with client.create_session(SPEC, list(range(TOKENS_MAX))) as session:
        table = session._transport.views[0].segment.tables[0]
    table.tier.retain(table.blocks)
    yield client
    table.tier.release(table.blocks)
    client.close()


def test_a_block_without_an_owner_is_noticed_while_its_database_is_open(broken, integrity_watch):
    assert "references" in str(integrity_watch.take_errors()[0])


def test_a_block_without_an_owner_is_noticed_when_its_database_is_closed(integrity_watch):
    database = Database(config(block_size=8))
    tables = database._blocks.tables(SPEC)
    tables[0].reserve(8)
    database.close()
    assert "owner" in str(integrity_watch.take_errors()[0])


def test_a_session_that_forgets_a_table_is_noticed(integrity_watch):
    """The whole of what is open is compared, not only what contexts hold."""
    database = Database(config(block_size=8))
    session = database.create_session(SPEC, [1, 2])
    session._layers[0].tail.reserve(2)
    database.handles.remove(session)
    database.close()
    assert integrity_watch.take_errors()
    session.close()
