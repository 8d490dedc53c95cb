"""An import into a store is on the disk when its last tokens come, and nothing of it is seen, counted or left before its end."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

import kvdb.storage.segment_head as segment_head
from kvdb.errors import AlreadyExists, CapacityError, Unavailable
from kvdb.types import Retention
from tests.racing import race
from tests.stores import SPEC, connect, holds, kv_of, names, put
from tests.waiting import until

DOC, OTHER = np.arange(300) % 50, (1 + np.arange(400)) % 31  # they begin with different tokens


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1)


@pytest.fixture
def db(tmp_path):
    with connect(tmp_path) as db:
        put(db, OTHER, "other")
        yield db


def begun(db, tokens, name, layers=1, durability=None):
    """An import of which some layers have come."""
    writer = db._transport.begin_import(SPEC, np.asarray(tokens, np.int32), name, retention=Retention(durability))
    for layer in range(layers):
        writer.write(layer, *kv_of(tokens)[layer])
    return writer


def segments(folder):
    """The names of all files of segments, finished or not."""
    return sorted(path.name for path in folder.glob("segments/*") if ".segment" in path.name)


def unfinished(folder):
    (path,) = folder.glob("segments/.*.segment")
    return path


@pytest.mark.needs_folder
def test_what_has_come_is_on_the_disk_before_the_end(db, tmp_path):
    writer = begun(db, DOC, "doc")
    k, v = kv_of(DOC)[0]
    until(lambda: all(plane[0, 192:256].tobytes() in unfinished(tmp_path).read_bytes() for plane in (k, v)))
    assert names(db) == ["other"]
    db._transport.check_integrity()
    writer.write(1, *kv_of(DOC)[1])
    writer.commit()
    assert (names(db), segments(tmp_path)) == (["doc", "other"], ["0.segment", "1.segment"])
    db._transport.check_integrity()
    db.close()
    with connect(tmp_path) as again:
        assert holds(again, DOC)
        assert holds(again, OTHER)


@pytest.mark.needs_folder
def test_an_import_that_is_given_up_leaves_no_file(db, tmp_path):
    before = db._transport.tiers()
    for end in ("abort", "close"):
        writer = begun(db, DOC, "doc", layers=2)
        assert len(segments(tmp_path)) == 2
        getattr(writer, end)()
        assert segments(tmp_path) == ["0.segment"]
        db._transport.check_integrity()
    assert [tier.blocks_used for tier in db._transport.tiers()] == [tier.blocks_used for tier in before]
    begun(db, DOC, "doc")
    db.close()
    assert segments(tmp_path) == ["0.segment"]


def test_a_name_that_was_taken_meanwhile_leaves_no_file(db, tmp_path):
    writer = begun(db, DOC, "doc", layers=2)
    put(db, DOC[:70], "doc")
    files = segments(tmp_path)
    with pytest.raises(AlreadyExists):
        writer.commit()
    assert segments(tmp_path) == [name for name in files if not name.startswith(".")]
    db._transport.check_integrity()


@pytest.mark.needs_folder
@pytest.mark.parametrize("durability", ["memory", "os"])
def test_what_each_durability_writes_early(db, tmp_path, durability):
    writer = begun(db, DOC, "doc", layers=2, durability=durability)
    assert len(segments(tmp_path)) == (1 if durability == "memory" else 2)
    writer.commit()
    db.close()
    with connect(tmp_path) as again:
        assert holds(again, DOC)


@pytest.mark.needs_folder
@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EIO, Unavailable)])
def test_a_disk_that_fails_in_the_middle(db, tmp_path, monkeypatch, number, error):
    write, calls = os.pwritev, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 3:
            raise OSError(number, os.strerror(number))
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(error, match=os.strerror(number)):
            put(db, DOC, "doc")
    assert (names(db), segments(tmp_path)) == (["other"], ["0.segment"])
    db._transport.check_integrity()
    put(db, DOC, "doc")
    assert holds(db, DOC)


def test_a_budget_of_the_disk_that_is_too_small_is_said_with_the_first_blocks(tmp_path):
    with connect(tmp_path, disk_bytes_max=1 << 14) as db:
        writer = db._transport.begin_import(SPEC, DOC.astype(np.int32), "doc")
        with pytest.raises(CapacityError, match="disk_bytes_max"):
            writer.write(0, *kv_of(DOC)[0])
        writer.abort()
        assert segments(tmp_path) == []
        db._transport.check_integrity()


@pytest.mark.needs_folder
def test_imports_at_the_same_time(db, tmp_path):
    texts = [(40 + step * np.arange(1, 201)) % 53 for step in (2, 3, 5)]

    def again(number):
        put(db, texts[number], f"doc{number}")
        assert holds(db, texts[number])
        db.drop(f"doc{number}")

    race(*(lambda number=number: again(number) for number in range(3)))
    db._transport.check_integrity()
    with ExitStack() as open_imports:
        writers = [begun(db, text, f"doc{number}", layers=2) for number, text in enumerate(texts)]
        for writer in reversed(writers):
            open_imports.callback(writer.close)
        for writer in writers[:2]:
            writer.commit()
    assert names(db) == ["doc0", "doc1", "other"]
    assert len(segments(tmp_path)) == 3
    assert holds(db, texts[1])


KILLED = """
import sys
import kvdb.storage.segment_head as segment_head
from tests.kvdb.ingest.test_early_file import DOC, OTHER, begun, connect, put
segment_head.PIECE_BYTES = 1
db = connect(sys.argv[1])
put(db, OTHER, "other")
writer = begun(db, DOC, "doc", layers=2)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.needs_folder
def test_a_process_that_is_killed_in_the_middle_leaves_what_was_there_before(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert segments(tmp_path) == [".1.segment", "0.segment"]
    with connect(tmp_path) as db:
        assert (names(db), segments(tmp_path)) == (["other"], ["0.segment"])
        assert holds(db, OTHER)
        db._transport.check_integrity()
