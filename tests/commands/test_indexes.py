"""`kvdb indexes`, `kvdb index` and `kvdb verify` on a server."""

import pytest

import indexes.registry as registry
import kvdb
from kvdb.cli import main
from kvdb.config import Config, IndexConfig, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.scan import Scan

NAME = "handbook"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", {**registry.KINDS, "flat": Scan})


@pytest.fixture
def engine():
    config = Config(storage=StorageConfig(arena_bytes=1 << 20), indexes=IndexConfig(segment_tokens_min=100))
    with Database(config) as database:
        yield database


@pytest.fixture
def command(engine, spec, make_kv, capsys):
    """`command(*arguments)` runs one against a server that wants a token and holds 130 tokens: its status, and what it said."""
    server = Server(engine, ServerConfig(port=0, token="secret"))
    server.start()
    kv = make_kv(spec, 130)
    with kvdb.connect(server.target, token="secret") as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name=NAME)
        db.import_context(spec, kv.tokens[:5] + 1, kv.pairs(0, 5), name="short")

    def run(*arguments, token="secret"):
        status = main([*arguments, "--server", server.target, "--token", token])
        said = capsys.readouterr()
        return status, said.out + said.err

    yield run
    server.stop(grace=0)


def test_an_index_is_built_listed_and_verified(command, engine, spec):
    status, said = command("indexes", NAME)
    assert (status, said) == (0, "no index over 'handbook'; segments that are long enough get one by kvdb index\n")
    assert command("verify", NAME) == (0, "0 indexes of 'handbook' fit their keys, counted by layer and segment\n")
    status, said = command("index", NAME)
    assert status == 0
    assert command("indexes", NAME) == (0, said)
    titles, row = said.splitlines()
    assert titles.split() == ["kind", "segment", "tokens", "layers", "MiB", "of", "the", "KV"]
    kind, _, *figures = row.split()
    share = 2 * 130 / (130 * 2 * spec.token_nbytes)
    assert (kind, *figures) == ("flat", "130", "2", "of", "2", "0.0", f"{share:.1%}")
    assert command("verify", NAME) == (0, "2 indexes of 'handbook' fit their keys, counted by layer and segment\n")


def test_a_short_context_gets_none(command):
    assert command("index", "short")[1].startswith("no index over 'short'")


def test_an_index_that_does_not_fit_is_status_1(command, engine):
    command("index", NAME)
    engine._catalog.get(NAME).views[0].segment.indexes.of(1)["flat"].broken = "token 3 differs"
    status, said = command("verify", NAME)
    assert status == 1
    assert said.startswith("kvdb: index flat of segment ")
    assert "token 3 differs" in said


@pytest.mark.parametrize("verb", ["indexes", "index", "verify"])
def test_errors_are_one_line_and_status_1(command, verb):
    for status, said in (command(verb, "none"), command(verb, NAME, token="wrong")):
        assert status == 1
        assert said.startswith("kvdb: ")
        assert said.count("\n") == 1


def test_a_kind_that_does_not_exist_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["index", NAME, "--kind", "tree"])
    assert ended.value.code == 2
    assert "coarse-bounds" in capsys.readouterr().err


def test_the_token_comes_from_the_environment(command, engine, monkeypatch):
    monkeypatch.setenv("KVDB_TOKEN", "secret")
    with pytest.raises(SystemExit):
        main(["indexes"])
    server = Server(engine, ServerConfig(port=0, token="secret"))
    server.start()
    assert main(["indexes", NAME, "--server", server.target]) == 0
    server.stop(grace=0)
