"""`kvdb indexes` and `kvdb index`, and `kvdb verify` of indexes, on a server."""

from dataclasses import replace

import pytest

import kvdb
import kvdb.commands.indexes as commands
from indexes.base import IndexCorrupt
from kvdb.__main__ import main
from kvdb.config import Config, IndexConfig, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.scan import Scan

pytestmark = pytest.mark.usefixtures("scan_for_flat")

NAME = "handbook"


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
    assert command("verify", NAME) == (0, "'handbook': as written; 0 blocks on disk, 0 indexes, 0 bytes\n")
    status, said = command("index", NAME)
    assert status == 0
    assert command("indexes", NAME) == (0, said)
    titles, row = said.splitlines()
    assert titles.split() == ["kind", "segment", "tokens", "layers", "MiB", "of", "the", "KV", "state"]
    kind, _, *figures = row.split()
    share = 2 * 130 / (130 * 2 * spec.token_nbytes)
    assert (kind, *figures) == ("flat", "130", "2", "of", "2", "0.0", f"{share:.1%}", "ready")
    assert command("verify", NAME) == (0, "'handbook': as written; 0 blocks on disk, 2 indexes, 0 bytes\n")


def test_a_short_context_gets_none(command):
    assert command("index", "short")[1].startswith("no index over 'short'")


def test_an_index_that_does_not_fit_is_status_7(command, monkeypatch):
    command("index", NAME)

    def differs(index):
        raise IndexCorrupt("token 3 differs")

    monkeypatch.setattr(Scan, "verify", differs)
    status, said = command("verify", NAME)
    assert status == 7
    assert said.startswith("'handbook': index flat of segment ")
    assert "token 3 differs" in said


@pytest.mark.parametrize("verb", ["indexes", "index", "verify"])
def test_errors_are_one_line_and_have_a_status(command, verb):
    for expected, (status, said) in ((3, command(verb, "none")), (5, command(verb, NAME, token="wrong"))):
        assert status == expected
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


def half_built(engine):
    """A build that has come half of its way, for as long as `engine.indexes` is asked once."""
    info = kvdb.IndexInfo(7, 130, "hnsw", 1, 2, 4096, "building", 0.5, 30.0, 110.0)
    states = [info, replace(info, progress=0.75, seconds=100.0), replace(info, layers=2, progress=1.0, state="ready")]
    return lambda name: [states.pop(0) if len(states) > 1 else states[0]]


def test_what_is_under_way_is_shown_with_a_bar(command, engine, monkeypatch):
    monkeypatch.setattr(engine, "indexes", half_built(engine))
    status, said = command("indexes", NAME)
    assert status == 0
    assert said.splitlines()[1].endswith("██████████░░░░░░░░░░  50%, 1 min 20 s left")


def test_a_failed_build_says_why(command, engine, monkeypatch):
    failed = kvdb.IndexInfo(7, 130, "hnsw", 0, 2, 0, "failed", 0.0, error="no room")
    monkeypatch.setattr(engine, "indexes", lambda name: [failed])
    assert command("indexes", NAME)[1].splitlines()[1].endswith("failed: no room")


def test_watching_ends_when_nothing_is_under_way(command, engine, monkeypatch):
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(engine, "indexes", half_built(engine))
    status, said = command("indexes", NAME, "--watch")
    assert status == 0
    first, second, titles, row = said.splitlines()
    assert first == "hnsw of segment 7: ██████████░░░░░░░░░░  50%, 1 min 20 s left"
    assert second == "hnsw of segment 7: ███████████████░░░░░  75%, 10 s left"
    assert titles.startswith("kind")
    assert row.endswith("ready")


def test_a_terminal_is_drawn_over(command, engine, monkeypatch):
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(engine, "indexes", half_built(engine))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    said = command("indexes", NAME, "--watch")[1]
    assert said.count("\x1b[2F\x1b[J") == 2
    assert said.rsplit("\x1b[J", 1)[1].count("\n") == 2
