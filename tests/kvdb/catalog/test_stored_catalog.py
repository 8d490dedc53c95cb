"""A store keeps every context, whatever ends the process, and never answers from what was changed on the disk."""

import logging
import resource
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.errors import (
    AlreadyExists,
    CapacityError,
    ConfigError,
    IntegrityError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from tests.stores import SPEC, compacted, connect, holds, kv_of, names, put

DOC = np.arange(300) % 50


def test_contexts_are_there_when_the_store_is_opened_again(tmp_path):
    longer = np.r_[DOC, 1, 2, 3]
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        put(db, longer, "longer")
        put(db, np.r_[DOC[:100], 60, 61], "other")
        before = [repr(context) for context in compacted(db).contexts()]
    with connect(tmp_path) as db:
        assert [repr(context) for context in db.contexts()] == before
        assert all(holds(db, tokens) for tokens in (DOC, longer, np.r_[DOC[:100], 60, 61]))
        with pytest.raises(AlreadyExists):
            put(db, DOC, "doc")


@pytest.mark.needs_folder
def test_what_is_dropped_stays_so_and_its_space_comes_back(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        put(db, np.r_[DOC, 1, 2, 3], "longer")
        db.drop("doc")
        compacted(db)
        assert len(list(tmp_path.glob("segments/*"))) == 1  # the other one sees its tokens
    with connect(tmp_path) as db:
        assert names(db) == ["longer"]
        assert holds(db, np.r_[DOC, 1, 2, 3])
        db.drop("longer")
        assert not list(tmp_path.glob("segments/*"))
    with connect(tmp_path) as db:
        assert names(db) == []


def test_sessions_chunks_and_layouts_are_kept(tmp_path):
    with connect(tmp_path) as db:
        db.import_chunk(SPEC, DOC, kv_of(DOC), name="chunk")
        with db.create_session(SPEC, []) as session:
            for layer, (k, v) in enumerate(kv_of(DOC[:40])):
                session.update(layer, k, v)
            session.store("told", DOC[:40])
    with connect(tmp_path) as db:
        assert names(db) == ["chunk", "told"]
        assert holds(db, DOC[:40])
        with db.create_session(SPEC, parts=["told", "chunk"]) as session:
            assert session.reused == 340


@pytest.mark.needs_folder
def test_a_segment_that_is_open_outlives_its_context_and_leaves_no_file(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        session = db.create_session(SPEC, DOC)
        db.drop("doc")
        assert len(list(tmp_path.glob("segments/*"))) == 1
        session.store("again", DOC)
        session.close()
    with connect(tmp_path) as db:
        assert names(db) == ["again"]
        assert holds(db, DOC)


def test_offloading_uses_the_store_and_needs_no_second_file(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("segments/*")}
        assert db.offload("doc") > 0
        assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("segments/*")} == written
        assert holds(db, DOC)


def damage(folder, statement):
    """Change the catalogue of a store that is closed, as a fault of the disk might."""
    with sqlite3.connect(folder / "catalog.db") as db:
        for table in ("spec", "segment", "context"):
            for event in ("came", "went"):
                db.execute(f"DROP TRIGGER {table}_{event}")
        db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE context SET views = replace(views, '300', '299') WHERE name = 'doc'",
        "UPDATE context SET length = 299 WHERE name = 'doc'",
        "UPDATE context SET crc = crc + 1 WHERE name = 'doc'",
        "UPDATE context SET crc = 'x' WHERE name = 'doc'",
        "UPDATE context SET views = CAST(x'5B80' AS TEXT) WHERE name = 'doc'",
        "UPDATE segment SET tokens = zeroblob(length(tokens)) WHERE file = '0.segment'",
        "UPDATE segment SET base = 1 WHERE file = '0.segment'",
        "DELETE FROM segment WHERE file = '0.segment'",
    ],
)
def test_a_context_that_was_damaged_is_told_apart_and_never_used(tmp_path, statement, caplog):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        put(db, DOC[::-1], "other")
    damage(tmp_path, statement)
    with caplog.at_level(logging.ERROR), connect(tmp_path) as db:
        assert "nothing is answered from: doc" in caplog.text
        assert names(db) == ["other"]
        assert holds(db, DOC[::-1])
        assert not holds(db, DOC)
        with pytest.raises(IntegrityError, match="context 'doc' was damaged on the disk; drop it"):
            db.indexes("doc")
        with pytest.raises(AlreadyExists, match="was damaged; drop it first"):
            put(db, DOC, "doc")
        db.drop("doc")
        put(db, DOC, "doc")
        assert holds(db, DOC)
    with connect(tmp_path) as db:
        assert names(db) == ["doc", "other"]
        assert holds(db, DOC)


def test_a_spec_that_was_damaged_takes_its_contexts_with_it(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    damage(tmp_path, "UPDATE spec SET fields = replace(fields, '10000.0', '10001.0')")
    with connect(tmp_path) as db:
        assert names(db) == []
        with pytest.raises(IntegrityError):
            db.indexes("doc")


@pytest.mark.needs_folder
def test_a_context_that_is_lost_is_told_and_its_blocks_are_kept(tmp_path, caplog):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    damage(tmp_path, "DELETE FROM context")
    with caplog.at_level(logging.ERROR), connect(tmp_path):
        assert "lost contexts whose names are not known" in caplog.text
    assert len(list(tmp_path.glob("segments/*"))) == 1


@pytest.mark.needs_folder
@pytest.mark.parametrize("fault", ["gone", "cut", "longer"])
def test_a_segment_that_is_not_whole_takes_its_contexts_with_it(tmp_path, fault):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        put(db, np.r_[DOC, 1, 2], "longer")
        compacted(db)
    (path,) = tmp_path.glob("segments/*.segment")
    content = path.read_bytes()
    path.unlink()
    if fault != "gone":
        path.write_bytes(content[:-1] if fault == "cut" else content + b"0")
    with connect(tmp_path) as db:
        assert names(db) == []
        assert not holds(db, DOC)
        db.drop("doc")
        db.drop("longer")
        put(db, DOC, "doc")
    with connect(tmp_path) as db:
        assert names(db) == ["doc"]
        assert holds(db, DOC)


@pytest.mark.needs_folder
def test_a_block_that_was_changed_is_never_read(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    path = tmp_path / "segments" / "0.segment"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with connect(tmp_path) as db:
        with pytest.raises(IntegrityError, match="does not match its checksum"):
            holds(db, DOC)
        db.drop("doc")
        put(db, DOC, "doc")
        assert holds(db, DOC)


@pytest.mark.needs_folder
@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        (b"no database at all, " * 100, IntegrityError, "was damaged: file is not a database"),
        (b"", IntegrityError, "is gone, and .* is not empty"),
        (None, IntegrityError, "is gone, and .* is not empty"),
    ],
)
def test_a_store_without_its_catalogue_is_not_touched(tmp_path, content, error, told):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    (tmp_path / "catalog.db").unlink()
    if content is not None:
        (tmp_path / "catalog.db").write_bytes(content)
    for _ in range(2):
        with pytest.raises(error, match=told):
            connect(tmp_path)
    assert len(list(tmp_path.glob("segments/*"))) == 1


@pytest.mark.needs_folder
def test_tables_whose_columns_have_no_name_any_more_are_not_read(tmp_path):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
    with sqlite3.connect(tmp_path / "catalog.db") as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'prefix_end', CAST(x'ECECEC' AS TEXT)) WHERE name = 'context'")
    db.close()
    with pytest.raises(IntegrityError, match="was damaged"):
        connect(tmp_path)
    assert len(list(tmp_path.glob("segments/*"))) == 1


@pytest.mark.parametrize(
    ("pragma", "error", "told"),
    [
        ("user_version = 9", Unsupported, "has version 9; this kvdb reads versions 1 to 4"),
        ("application_id = 7", IntegrityError, "no catalogue"),
    ],
)
def test_a_catalogue_of_another_kind_is_refused(tmp_path, pragma, error, told):
    connect(tmp_path).close()
    with sqlite3.connect(tmp_path / "catalog.db") as db:
        db.execute(f"PRAGMA {pragma}")
    db.close()
    with pytest.raises(error, match=told):
        connect(tmp_path)


def test_settings_that_do_not_fit_the_store_are_told(tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
    with pytest.raises(ConfigError, match="blocks of 64 tokens; set storage.block_size to that"):
        connect(tmp_path / "store", block_size=32)
    with pytest.raises(InvalidArgument, match="storage.path of the configuration"):
        connect(tmp_path / "store", path=str(tmp_path / "another"))
    with pytest.raises(ConfigError, match=r"storage.path and storage.disk_path are both set"):
        connect(tmp_path / "store", path=str(tmp_path / "store"), disk_path=str(tmp_path))
    with connect(tmp_path / "store", path=str(tmp_path / "store")) as db:  # and what was refused left nothing open
        assert names(db) == ["doc"]


@pytest.mark.needs_folder
def test_a_full_store_takes_nothing_and_forgets_nothing(tmp_path):
    with connect(tmp_path, disk_bytes_max=200_000) as db:
        put(db, DOC, "doc")
        with pytest.raises(CapacityError, match="disk_bytes_max"):
            put(db, np.arange(2000), "large")
        assert names(db) == ["doc"]
        assert len(list(tmp_path.glob("segments/*"))) == 1
        db.drop("doc")
        with pytest.raises(NotFound):
            db.drop("doc")
        put(db, DOC[:50], "small")
    with connect(tmp_path) as db:
        assert names(db) == ["small"]
        assert holds(db, DOC[:50])


@pytest.mark.needs_folder
def test_a_catalogue_that_cannot_be_written_takes_nothing_more_until_it_is_opened_again(tmp_path):
    """No file may become as long as the log would for this spec, which is longer than its segment."""
    large = replace(SPEC, rope=kvdb.Rope(scaling=(("rope_type", "x" * 60_000),)))
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            with pytest.raises(Unavailable, match="disk I/O error"):
                db.import_context(large, [1], kv_of([1]), name="other")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for call in (lambda: put(db, DOC[:5], "other"), lambda: db.drop("doc")):
            with pytest.raises(Unavailable, match="takes nothing more, because .* could not be written"):
                call()
        assert names(db) == ["doc"]
        assert holds(db, DOC)
        assert len(list(tmp_path.glob("segments/*"))) == 1
    with connect(tmp_path) as db:
        assert names(db) == ["doc"]
        assert holds(db, DOC)
        put(db, DOC[:5], "other")


def test_threads_may_store_and_drop_at_once(tmp_path):
    def work(db, number):
        rng = np.random.default_rng(number)
        mine = {}
        for step in range(12):
            name = f"{number}-{int(rng.integers(3))}"
            if name in mine:
                db.drop(name)
                del mine[name]
            else:
                mine[name] = np.r_[DOC[: int(rng.integers(0, 3)) * 50], number, step, 3]
                put(db, mine[name], name)
        return mine

    with connect(tmp_path) as db, ThreadPoolExecutor(4) as pool:
        stored = {name: tokens for mine in pool.map(lambda number: work(db, number), range(4)) for name, tokens in mine.items()}
        with pytest.raises(AlreadyExists):
            list(pool.map(lambda _: put(db, DOC, "the same"), range(4)))
        stored["the same"] = DOC
        assert names(db) == sorted(stored)
    with connect(tmp_path) as db:
        assert names(db) == sorted(stored)
        assert all(holds(db, tokens) for tokens in stored.values())


def test_a_store_may_be_named_by_a_path_that_is_not_absolute(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with connect("store") as db:
        monkeypatch.chdir(tmp_path / "elsewhere")
        put(db, DOC, "doc")
        db.offload("doc")
        assert holds(db, DOC)
    assert not list((tmp_path / "elsewhere").iterdir())
    with connect("../store") as db:
        assert names(db) == ["doc"]
