"""A file that is written while its blocks come is the one that is written at once, or there is none."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb.storage.segment_head as segment_head
from kvdb.errors import CapacityError, Unavailable
from kvdb.storage.block_table import BlockTable
from tests.kvdb.storage.blocks import CRUMBS, PAGES, Stored, folder, writing
from tests.waiting import until

LAYOUTS = {"pages": PAGES, "crumbs": CRUMBS}


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(3) as threads:
        yield threads


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 70), st.sampled_from([1, 1 << 14, 4 << 20]), st.data())
def test_tokens_may_come_in_any_order_of_layers_and_in_parts_of_any_size(tmp_path_factory, threads, layout, tokens, piece, data):
    path = tmp_path_factory.mktemp("written")
    stored = Stored(LAYOUTS[layout], tokens=tokens, dirty=True)
    stored.write(path / "0.segment")
    parts = data.draw(st.lists(st.tuples(st.integers(0, stored.layers - 1), st.integers(1, tokens)), max_size=12))
    synced = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_head, "PIECE_BYTES", piece)
        begun = writing(folder(path), "1.segment", stored.contents(), threads)
        tables = [BlockTable(stored.tier, stored.layout) for _ in range(stored.layers)]
        for layer, n in [*parts, *((layer, tokens) for layer in range(stored.layers))]:
            table, (k, v) = tables[layer], stored.kv[layer]
            if table.length < tokens:
                here = slice(table.length, min(table.length + n, tokens))
                table.append(k[:, here], v[:, here])
            begun.take(layer, table)
        begun.finish(tables, "", synced=synced)
    assert (path / "1.segment").read_bytes() == (path / "0.segment").read_bytes()
    assert sorted(os.listdir(path)) == ["0.segment", "1.segment"]
    stored.close()


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EIO, Unavailable)])
def test_what_cannot_be_written_is_said_while_tokens_still_come(tmp_path, threads, monkeypatch, number, error):
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1)
    stored, descriptors = Stored(PAGES), len(os.listdir("/proc/self/fd"))

    def failing(*_):
        raise OSError(number, os.strerror(number))

    begun = writing(folder(tmp_path), "0.segment", stored.contents(), threads)
    monkeypatch.setattr(os, "pwritev", failing)
    assert until(lambda: _raised(begun, stored, error))
    with pytest.raises(error, match=os.strerror(number)):
        begun.take(1, stored.tables[1])
    with pytest.raises(error, match=os.strerror(number)):
        begun.finish(stored.tables, "", synced=True)
    assert (os.listdir(tmp_path), len(os.listdir("/proc/self/fd"))) == ([], descriptors)
    stored.close()


def _raised(begun, stored, error):
    try:
        begun.take(0, stored.tables[0])
    except error:
        return True
    return False


def test_no_block_is_read_any_more_once_a_file_was_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1)
    stored, write, under_way = Stored(PAGES), os.pwritev, []

    def noted(*arguments):
        under_way.append(arguments)
        try:
            return write(*arguments)
        finally:
            under_way.pop()

    monkeypatch.setattr(os, "pwritev", noted)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(20):
            begun = writing(folder(tmp_path), "0.segment", stored.contents(), threads)
            for layer, table in enumerate(stored.tables):
                begun.take(layer, table)
            begun.abandon()
            assert not under_way
            assert os.listdir(tmp_path) == []
    stored.close()


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, threads, monkeypatch):
    stored = Stored(PAGES)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="has no room for a segment of"):
        writing(folder(tmp_path), "0.segment", stored.contents(), threads)
    assert os.listdir(tmp_path) == []
    stored.close()
