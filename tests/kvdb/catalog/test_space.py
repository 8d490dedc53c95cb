"""How much space stored contexts take, beside the least that what they name can take."""

import numpy as np
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.stores import SPEC, compacted, config, connect, kv_of, put

BLOCK = 32
BLOCK_NBYTES = 2 * SPEC.kv_heads * BLOCK * SPEC.head_dim * 4
DOC = np.arange(3 * BLOCK)


def blocks(space):
    """What is held and what is reachable, in blocks of one layer."""
    return space.held / BLOCK_NBYTES / SPEC.layers, space.reachable / BLOCK_NBYTES / SPEC.layers


@pytest.fixture(params=["embedded", "server"])
def db(request, tmp_path):
    if request.param == "embedded":
        with connect(tmp_path, block_size=BLOCK) as opened:
            yield opened
        return
    with Database(config(block_size=BLOCK)) as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as opened:
                yield opened
        finally:
            server.stop(grace=0)


def test_a_token_that_is_named_twice_is_held_once(db):
    assert blocks(db.space()) == (0, 0)
    put(db, DOC, "doc")
    assert blocks(db.space()) == (3, 3)
    put(db, np.r_[DOC[: 2 * BLOCK], 1, 2], "other")
    assert blocks(db.space()) == (4, 4)
    db.import_chunk(SPEC, DOC + 1, kv_of(DOC + 1), name="chunk", base=7)
    assert blocks(db.space()) == (7, 7)


def test_what_no_context_names_is_held_until_it_is_given_back(db):
    put(db, DOC, "long")
    put(db, DOC[:BLOCK], "short")
    with db.create_session(SPEC, DOC):
        db.drop("long")
        held, reachable = blocks(db.space())
        assert reachable == 1
        assert held >= reachable
    assert blocks(compacted(db).space()) == (1, 1)


def test_contexts_on_disk_count_as_those_in_memory(tmp_path):
    with connect(tmp_path, block_size=BLOCK) as db:
        put(db, DOC, "doc")
        before = db.space()
        db.offload("doc")
        assert db.space() == before
    with connect(tmp_path, block_size=BLOCK) as db:
        assert db.space() == before
