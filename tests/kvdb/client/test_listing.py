"""Contexts are listed in pages, prompts matched, token ids read back, and several contexts dropped at once, embedded or not."""

import functools
import operator

import numpy as np
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import InvalidArgument, NotFound
from kvdb.server import service
from kvdb.server.serve import Server
from tests.stores import SPEC, config, connect, names, put

DOC = np.arange(100) % 50


@pytest.fixture(params=["embedded", "remote"])
def place(request, tmp_path):
    """A client of a database with a disk."""
    if request.param == "embedded":
        with connect(tmp_path) as db:
            yield db
        return
    with Database(config(path=str(tmp_path))) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        with kvdb.connect(server.target) as db:
            yield db
        server.stop(grace=0)


def test_contexts_come_in_pages(place):
    for number in range(7):
        put(place, [number], f"doc/{number}")
    put(place, [9], "other")
    assert [context.name for context in place.contexts("doc/", limit=3)] == ["doc/0", "doc/1", "doc/2"]
    pages, after = [], ""
    while page := [context.name for context in place.contexts(limit=3, after=after)]:
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [3, 3, 2]
    assert functools.reduce(operator.iadd, pages, []) == names(place)
    assert place.contexts("none") == []


@pytest.mark.parametrize(
    "wrong",
    [{"prefix": 1}, {"prefix": "\ud800"}, {"limit": 0}, {"limit": 2.5}, {"limit": 1 << 63}, {"after": 3}],
)
def test_a_wrong_page_is_refused(place, wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        place.contexts(**wrong)


def test_prompts_are_matched_without_a_session(place):
    put(place, DOC, "doc")
    put(place, np.r_[DOC, np.arange(64)], "longer")
    assert place.match(SPEC, np.r_[DOC[:70], 60]) == kvdb.PrefixMatch(tokens=70, resident=70)
    assert place.match(SPEC, [49]) == kvdb.PrefixMatch(tokens=0, resident=0)
    assert place.match(SPEC, []) == kvdb.PrefixMatch(tokens=0, resident=0)
    place.offload("doc")
    assert place.match(SPEC, np.r_[DOC, np.arange(65)]) == kvdb.PrefixMatch(tokens=164, resident=64)
    with pytest.raises(InvalidArgument):
        place.match(SPEC, [-1])


def test_token_ids_come_back(place, monkeypatch):
    monkeypatch.setattr(service, "TOKENS_OF_REPLY", 64)
    put(place, DOC, "doc")
    put(place, np.r_[DOC[:80], 1, 2], "other")
    ids = place.get("doc").token_ids()
    assert ids.dtype == np.int32
    assert ids.tolist() == DOC.tolist()
    ids[:] = 0  # a copy
    other = place.get("other")
    assert other.token_ids().tolist() == [*DOC[:80], 1, 2]
    assert place.get("doc").token_ids().tolist() == DOC.tolist()
    other.drop()
    with pytest.raises(NotFound):
        other.token_ids()


def test_several_contexts_are_dropped_at_once(place):
    for name in ("a", "b", "c", "d"):
        put(place, [ord(name) % 50], name)
    place.drop("a", "c")
    assert names(place) == ["b", "d"]
    with pytest.raises(NotFound, match="'none'"):
        place.drop("b", "none", "d")
    assert names(place) == ["b", "d"]
    with pytest.raises(InvalidArgument):
        place.drop("d", 3)
    assert names(place) == ["b", "d"]
    place.drop()
