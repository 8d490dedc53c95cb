"""A file gives back the bits that were written, or a typed error: never others, and never half of them."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import kvdb.storage.segment_head as segment_head
from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.segment_head import Contents
from kvdb.storage.stored_segment import StoredSegment
from tests.kvdb.storage.blocks import CRUMBS, PAGES, Stored, folder, write

ROOT_READS_ALL = os.geteuid() == 0


LAYOUTS = {"pages": PAGES, "crumbs": CRUMBS}


@pytest.fixture(params=LAYOUTS)
def stored(request):
    stored = Stored(LAYOUTS[request.param])
    yield stored
    stored.close()


@pytest.mark.parametrize("tokens", [1, 15, 16, 47, 48, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_come_back_in_any_order_as_they_were(tmp_path, layout, tokens):
    stored = Stored(LAYOUTS[layout], tokens=tokens)
    file = stored.write(tmp_path / "0.segment")
    tables = stored.empty()
    for layer in (2, 0, 1):
        file.read_layer(layer, tables[layer])
        assert stored.holds(tables[layer], layer)
    assert file.nbytes == (tmp_path / "0.segment").stat().st_size
    stored.close()


def test_blocks_that_lie_apart_and_pieces_of_one_block_are_moved_too(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1)
    file = stored.write(tmp_path / "0.segment")
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1 << 20)
    first = stored.empty()[0]
    first.addresses[:] = first.addresses[::-1].copy()  # as blocks lie that were taken from a full tier
    file.read_layer(1, first)
    assert stored.holds(first, 1)


def test_of_pieces_that_fail_nothing_is_under_way_any_more_when_it_is_said(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(segment_head, "PIECE_BYTES", 1)
    file = stored.write(tmp_path / "0.segment")
    tables, read, under_way = stored.empty(), os.preadv, []

    def failing(descriptor, buffers, at):
        under_way.append(at)
        try:
            if at > file.contents.extents_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, buffers, at)
        finally:
            under_way.remove(at)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(Unavailable, match="Input/output error"):
        file.read_layer(0, tables[0])
    assert not under_way
    monkeypatch.setattr(os, "preadv", read)
    file.read_layer(0, tables[0])
    assert stored.holds(tables[0], 0)


def test_a_call_that_moves_less_than_asked_goes_on(tmp_path, monkeypatch):
    stored = Stored(CRUMBS)
    write, read = os.pwritev, os.preadv

    def some(call):
        return lambda file, buffers, at: call(file, [memoryview(buffers[0])[:100]], at)

    monkeypatch.setattr(os, "pwritev", some(write))
    monkeypatch.setattr(os, "preadv", some(read))
    file = stored.write(tmp_path / "0.segment")
    tables = stored.empty()
    file.read_layer(2, tables[2])
    assert stored.holds(tables[2], 2)
    stored.close()


def test_nothing_of_other_segments_goes_to_the_disk(tmp_path):
    stored = Stored(CRUMBS, tokens=2, dirty=True)  # one of the three places of each block stays free
    stored.write(tmp_path / "0.segment")
    assert np.float32(7).tobytes() not in (tmp_path / "0.segment").read_bytes()
    stored.close()


def test_every_changed_byte_is_found_or_harmless(tmp_path, stored):
    """Every byte of a block and of the head is summed; what fills up extents is read by nobody."""
    file = stored.write(tmp_path / "0.segment")
    good = (tmp_path / "0.segment").read_bytes()
    rng = np.random.default_rng(1)
    contents, table = file.contents, stored.empty()[0]
    in_head = rng.integers(0, segment_head.HEAD_AT + contents.head_nbytes, 40).tolist()
    extent = contents.extents[1]
    data = extent.blocks * extent.layout.nbytes
    in_layer = (extent.at + rng.integers(0, data, 40)).tolist()
    for at in [0, 8, 12, 16, *in_head, extent.at, *in_layer]:
        (tmp_path / "0.segment").write_bytes(good[:at] + bytes([good[at] ^ 1 << int(rng.integers(8))]) + good[at + 1 :])
        if at < contents.extents_at:
            with pytest.raises(IntegrityError, match="its head is not what was written"):
                StoredSegment(folder(tmp_path), "0.segment", contents).read_layer(1, table)
            file.read_layer(1, table)
            assert stored.holds(table, 1)
        else:
            block = (at - extent.at) // extent.layout.nbytes
            with pytest.raises(IntegrityError, match=f"block {block} of layer 1 does not match its checksum"):
                file.read_layer(1, table)
            file.read_layer(0, table)  # the others are as good as before
            assert stored.holds(table, 0)


def test_a_file_that_was_cut_short_or_has_grown_is_found(tmp_path, stored):
    file = stored.write(tmp_path / "0.segment")
    table = stored.empty()[0]
    for size in (file.nbytes - 1, file.nbytes // 2, 0, file.nbytes + 1):
        os.truncate(tmp_path / "0.segment", size)
        with pytest.raises(IntegrityError, match=f"it has {size:,} bytes"):
            file.read_layer(0, table)
        with pytest.raises(IntegrityError, match="bytes of the"):
            StoredSegment(folder(tmp_path), "0.segment", file.contents).read_layer(0, table)


def test_a_file_of_version_1_has_a_checksum_for_each_block(tmp_path, stored):
    old = replace(stored.contents(), version=1)
    assert old.units == sum(old.blocks)
    path = tmp_path / "0.segment"
    write(folder(tmp_path), "0.segment", old, stored.tables)
    file = StoredSegment.adopt(folder(tmp_path), "0.segment", stored.contents())
    assert file.contents == old
    table = stored.empty()[0]
    file.read_layer(1, table)
    assert stored.holds(table, 1)
    damaged = bytearray(path.read_bytes())
    damaged[old.extents_at + 1] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(IntegrityError, match="block"):
        StoredSegment.adopt(folder(tmp_path), "0.segment", stored.contents()).verify()


def test_a_page_has_a_checksum_of_its_own_where_blocks_are_whole_pages(tmp_path):
    stored = Stored(PAGES)
    contents = stored.write(tmp_path / "0.segment").contents
    assert contents.extents[0].units == contents.extents[0].nbytes // mmap.PAGESIZE
    assert StoredSegment.adopt(folder(tmp_path), "0.segment", contents).contents == contents
    stored.close()


def test_a_file_is_not_taken_for_another(tmp_path, stored):
    stored.write(tmp_path / "0.segment")
    for other in (
        Contents("a/1.segment", "digest", stored.layers * (stored.layout,), stored.tokens),
        Contents("a/0.segment", "another", stored.layers * (stored.layout,), stored.tokens),
    ):
        with pytest.raises(IntegrityError):
            StoredSegment(folder(tmp_path), "0.segment", other).read_layer(0, stored.empty()[0])


def test_layers_that_changed_places_are_found(tmp_path, stored):
    file = stored.write(tmp_path / "0.segment")
    at, size = file.contents.extents_at, file.contents.extents[0].nbytes
    good = (tmp_path / "0.segment").read_bytes()
    (tmp_path / "0.segment").write_bytes(
        good[:at] + good[at + size : at + 2 * size] + good[at : at + size] + good[at + 2 * size :]
    )
    with pytest.raises(IntegrityError, match="block 0 of layer 0"):
        file.read_layer(0, stored.empty()[0])


def test_a_file_that_is_gone_or_cannot_be_read_is_a_typed_error(tmp_path, stored, monkeypatch):
    file = stored.write(tmp_path / "0.segment")
    monkeypatch.setattr(os, "preadv", fails(errno.EIO))
    with pytest.raises(Unavailable, match="cannot be read: Input/output error; make it readable again"):
        file.read_layer(0, stored.empty()[0])
    (tmp_path / "0.segment").unlink()
    with pytest.raises(Unavailable, match="No such file"):
        file.read_layer(0, stored.empty()[0])


def cached(path):
    """Pages of a file in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), size, mmap.MAP_PRIVATE) as memory:
        first = np.frombuffer(memory, np.uint8)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(size), pages)
        del first
        assert not failed
        return sum(page & 1 for page in pages)


def fails(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@contextmanager
def files_of_at_most(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_a_typed_error_and_leaves_no_file(tmp_path, stored):
    with files_of_at_most(4096), pytest.raises(CapacityError, match="has no room for a segment of"):
        stored.write(tmp_path / "0.segment")
    assert not list(tmp_path.iterdir())
    stored.write(tmp_path / "0.segment")


def test_a_disk_that_gets_full_on_the_way_is_one_too(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(os, "pwritev", fails(errno.ENOSPC))
    with pytest.raises(CapacityError):
        stored.write(tmp_path / "0.segment")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not ROOT_READS_ALL or sys.platform != "linux", reason="only root may mount")
def test_a_real_full_disk(tmp_path):
    stored = Stored(PAGES, layers=8, tokens=640)  # 2.6 MB
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvdb-test", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this place does not let root mount")
    try:
        with pytest.raises(CapacityError, match="No space left on device"):
            stored.write(tmp_path / "0.segment")
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
        stored.close()


def test_a_folder_that_is_gone_is_a_typed_error(tmp_path, stored):
    with pytest.raises(Unavailable, match="cannot be written to: No such file or directory; everything stays in main memory"):
        stored.write(tmp_path / "none" / "0.segment")


@pytest.mark.parametrize("refused", ["flag", "call"])
def test_a_file_system_without_direct_reads_and_writes_does(tmp_path, stored, monkeypatch, refused):
    """Some refuse the flag, others take it and refuse each call."""
    fcntl_, read, write, fallocate = fcntl.fcntl, os.preadv, os.pwritev, os.posix_fallocate

    def set_flags(file, command, argument=0):
        if refused == "flag" and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl_(file, command, argument)

    def refuse(call):
        def refusing(file, *arguments):
            if fcntl_(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(file, *arguments)

        return refusing

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    for name, call in (("preadv", read), ("pwritev", write), ("posix_fallocate", fallocate)):
        monkeypatch.setattr(os, name, refuse(call))
    file = stored.write(tmp_path / "0.segment")
    table = stored.empty()[0]
    file.read_layer(0, table)
    assert stored.holds(table, 0)


def test_what_is_written_and_read_does_not_stay_in_the_page_cache(tmp_path):
    stored = Stored(PAGES, layers=4, tokens=640)
    file = stored.write(tmp_path / "0.segment")
    for layer, table in enumerate(stored.empty()):
        file.read_layer(layer, table)
    assert file.nbytes > 300 * mmap.PAGESIZE
    assert cached(tmp_path / "0.segment") < 40  # those of the head, and what the system read ahead with it
    stored.close()


WRITER = """
import os, sys
from pathlib import Path
from tests.kvdb.storage.blocks import Stored
stored = Stored(layers=40)
real = {name: getattr(os, name) for name in ("pwritev", "fsync")}
def stopped(*arguments):
    result = real[sys.argv[2]](*arguments)
    os.write(1, b"stopped\\n")  # in one call: threads stop at the same time
    sys.stdin.read()
    return result
setattr(os, sys.argv[2], stopped)
stored.write(Path(sys.argv[1]) / "0.segment")
"""


@pytest.mark.parametrize("behind", ["pwritev", "fsync"])
def test_a_writer_that_is_killed_leaves_no_file_of_that_name(tmp_path, behind):
    """behind: the call of the system after whose first return the writer is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path, behind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=os.getcwd()
    ) as writer:
        assert writer.stdout.readline() == b"stopped\n"
        writer.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [".0.segment"]
