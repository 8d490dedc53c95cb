"""`kvdb verify` and `kvdb backup`, on a server and on a store."""

import json
import sqlite3
from threading import current_thread, main_thread

import numpy as np
import pytest

import kvdb
from kvdb.__main__ import main
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.kvdb.commands.offered import offered
from tests.stores import SPEC, config, connect, holds, kv_of, names, put

DOC = np.arange(300) % 50
LONGER = np.r_[DOC[:160], DOC[:143][::-1]]
"""It goes on otherwise where it leaves the other, so that compaction has nothing to join."""


@pytest.fixture
def store(tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        put(db, LONGER, "longer")
    return tmp_path / "store"


@pytest.fixture(params=["server", "store"])
def place(request, store):
    """What --server takes."""
    with offered(store, by=request.param) as target:
        yield target


@pytest.fixture
def run(place, capsys):
    """`run(*arguments)`: the status, the lines of stdout, and stderr."""

    def run(*arguments, at=place):
        status = main([*arguments, "--server", at])
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err

    return run


def test_a_whole_store_is_as_it_was_written(run):
    status, lines, said = run("verify")
    assert (status, said) == (0, "")
    assert lines[0].startswith("'doc': as written; 10 blocks on disk, 0 indexes, ")
    assert lines[2] == "the store: its catalogue, files and pools of blocks agree"
    status, lines, _ = run("verify", "--json")
    assert status == 0
    assert [json.loads(line)["name"] for line in lines] == ["doc", "longer", ""]
    assert run("verify", "doc")[1][0].startswith("'doc': as written")
    assert run("verify", "none")[0] == 3


@pytest.mark.needs_folder
def test_one_wrong_byte_is_found_and_the_status_says_so(run, store):
    path = store / "segments" / "1.segment"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    content[-8000] ^= 1
    path.write_bytes(content)
    status, lines, said = run("verify", "--json")
    assert status == 7
    found = {one["name"]: one for one in map(json.loads, lines)}
    assert found["doc"]["ok"]
    assert not found["longer"]["ok"]
    assert "1.segment" in found["longer"]["error"]
    assert said.startswith("kvdb: 1 damaged; drop them with kvdb drop NAME --server ")


def test_a_context_that_was_damaged_before_is_named(store, capsys):
    db = sqlite3.connect(store / "catalog.db")
    db.execute("UPDATE context SET length = 7 WHERE name = 'longer'")
    db.commit()
    db.close()
    assert main(["verify", "--server", str(store)]) == 7
    said = capsys.readouterr()
    assert "'longer': it was found damaged" in said.out
    assert "'doc': as written" in said.out


@pytest.mark.needs_folder
def test_what_lies_beside_a_segment_is_checked_too(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    (tmp_path / "segments" / "0.flat.1.index").write_bytes(b"no index")
    with connect(tmp_path) as db, pytest.raises(kvdb.errors.IntegrityError, match="0.flat.1.index was changed"):
        db.verify("doc")


@pytest.mark.needs_folder
def test_files_that_nobody_owns_are_found(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        assert db.verify_store() == []
        (tmp_path / "segments" / "7.segment").write_bytes(b"what is this?")
        with pytest.raises(kvdb.errors.IntegrityError, match="holds 2 files"):
            db.verify_store()
        (tmp_path / "segments" / "7.segment").unlink()


@pytest.mark.needs_folder
def test_a_backup_is_a_store(run, store, tmp_path):
    to = tmp_path / "backup"
    status, lines, _ = run("backup", str(to))
    assert status == 0
    assert lines[0].startswith(f"{to} is a store of 2 contexts: ")
    assert lines[0].endswith("; all were read and are whole")
    assert lines[1] == "it is on the file system of the store, and lost with it: keep one on another disk"
    assert run("verify", at=str(to))[0] == 0
    with connect(to) as db:
        assert holds(db, LONGER)
        db.drop("longer")
        put(db, np.arange(90), "new")
        assert names(db) == ["doc", "new"]
    assert run("verify")[0] == 0, "the store itself is as it was"
    status, _, said = run("backup", str(to))
    assert (status, "is not empty" in said) == (2, True)
    status, lines, _ = run("backup", str(tmp_path / "again"), "--json")
    done = json.loads(lines[0])
    assert (done["folder"], done["contexts"], done["linked"]) == (str(tmp_path / "again"), 2, 0)
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"catalog.db", "segments", "store.json"}
    files = [path for path in (tmp_path / "again").rglob("*") if path.is_file()]
    assert (done["copied"] + done["reflinked"], done["nbytes"]) == (len(files), sum(path.stat().st_size for path in files))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.needs_folder
def test_what_happens_to_a_backup_does_not_happen_to_the_store(run, tmp_path):
    assert run("backup", str(tmp_path / "backup"))[0] == 0
    for path in tmp_path.glob("backup/segments/*"):
        flip(path)
    assert run("verify")[0] == 0
    assert run("verify", at=str(tmp_path / "backup"))[0] == 7


@pytest.mark.needs_folder
def test_hard_links_are_made_for_who_asks_for_them(run, store, tmp_path):
    status, lines, _ = run("backup", str(tmp_path / "backup"), "--hard-links")
    assert (status, "2 copied, 2 hard links" in lines[0]) == (0, True)
    assert lines[1] == "hard links are the store's own files under a second name: what damages one damages both"
    assert (tmp_path / "backup" / "segments" / "0.segment").samefile(store / "segments" / "0.segment")


@pytest.mark.needs_folder
def test_a_backup_reads_what_it_wrote(run, store, tmp_path):
    flip(store / "segments" / "1.segment")
    status, _, said = run("backup", str(tmp_path / "backup"))
    assert (status, "1.segment is not what was stored" in said) == (7, True)
    assert list((tmp_path / "backup").iterdir()) == []


def test_space_is_given_back(run):
    """The longer context sees the tokens of both; what was behind them goes with it."""
    assert run("drop", "longer")[0] == 0
    status, lines, _ = run("compact", "--json")
    assert (status, json.loads(lines[0])["nbytes"] >= 0) == (0, True)
    assert run("compact")[1] == ["0 bytes of blocks were given back"]
    assert run("verify")[0] == 0


def test_a_server_takes_a_backup_to_an_absolute_path_only(store):
    with Database(config(path=str(store))) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        try:
            with kvdb.connect(server.target) as db, pytest.raises(kvdb.errors.InvalidArgument, match="expected an absolute path"):
                db.backup("somewhere")
        finally:
            server.stop(grace=0)


@pytest.mark.needs_folder
def test_a_backup_goes_on_while_contexts_come_and_go(tmp_path):
    """Whatever was there when it began is there in the copy, and whole, although it is dropped meanwhile."""
    with connect(tmp_path / "store") as db:
        for number in range(6):
            put(db, np.arange(70 + number) % 60 + number % 3, f"c{number}")
        put(db, DOC, "unwritten")
        db.import_context(SPEC, LONGER, kv_of(LONGER), name="memory", durability="memory")
        held = db._transport._catalog._disk.kept_beside

        def drop_one(file):
            for name in names(db)[:1] if current_thread() is main_thread() else ():  # compaction asks too
                db.drop(name)
            return held(file)

        db._transport._catalog._disk.kept_beside = drop_one
        assert db.backup(tmp_path / "copy").contexts == 7
        assert len(names(db)) < 7
        db._transport.check_integrity()
    with connect(tmp_path / "copy") as db:
        assert names(db) == [*(f"c{number}" for number in range(6)), "unwritten"]
        assert all(holds(db, np.arange(70 + number) % 60 + number % 3) for number in range(6))
        db._transport.check_integrity()


@pytest.mark.needs_folder
def test_a_backup_that_fails_is_no_store(tmp_path, monkeypatch):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        (tmp_path / "store" / "segments" / "0.segment").rename(tmp_path / "gone")
        with pytest.raises(kvdb.errors.IntegrityError, match="0.segment is gone"):
            db.backup(tmp_path / "copy")
        (tmp_path / "gone").rename(tmp_path / "store" / "segments" / "0.segment")
        assert list((tmp_path / "copy").iterdir()) == []
        (tmp_path / "a file").touch()
        with pytest.raises(kvdb.errors.Unavailable, match="cannot be written"):
            db.backup(tmp_path / "a file" / "below")
        assert db.backup(tmp_path / "copy").contexts == 1


def test_without_a_store_there_is_nothing_to_copy(db, tmp_path):
    with pytest.raises(kvdb.errors.Unsupported, match="needs a store"):
        db.backup(tmp_path / "copy")
