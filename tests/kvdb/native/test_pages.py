"""The pages of a layer come when they are asked for, checked, and go when others need the room."""

import ctypes
import errno
import threading

import numpy as np
import pytest

from indexes.arena import Arena
from kvdb import _native

PAGE, PAGES = 4096, 24


class Stored:
    """`layers` layers of random bytes in one file, over a pool with room for `room` pages."""

    def __init__(self, path, layers, room):
        self.path = path
        self.data = np.random.default_rng(0).integers(0, 256, (layers, PAGES, PAGE), np.uint8)
        path.write_bytes(self.data.tobytes())
        self.pool = _native.PagePool()
        self.pool.set_limit(room * PAGE)
        self.arenas = [Arena(PAGES * PAGE, plain=True) for _ in range(layers)]
        self.pages = [self.open(number) for number in range(layers)]

    def open(self, number):
        starts = np.array([page.ctypes.data for page in self.data[number]], np.uint64)
        sums = np.empty(PAGES, np.uint32)
        _native.crc32c(starts, PAGE, sums)
        place = str(self.path), self.data.nbytes, number * PAGES * PAGE, number, 2 * PAGE
        return _native.LayerPages(self.pool, self.arenas[number].address, PAGES * PAGE, PAGE, *place, PAGE, sums)

    def holds(self, number):
        return bool((self.arenas[number].bytes().reshape(PAGES, PAGE) == self.data[number]).all())

    def read(self, number):
        """All of a layer; False where it finds no room."""
        taken = self.pages[number].take_all()
        if taken:
            self.pages[number].read()
        return taken


def test_a_layer_is_read_and_makes_room_for_another(tmp_path):
    stored = Stored(tmp_path / "file", 2, PAGES + 4)
    assert stored.read(0)
    assert stored.holds(0)
    assert stored.read(1)
    assert stored.holds(1)
    assert not stored.pages[0].full
    assert stored.pool.nbytes <= (PAGES + 4) * PAGE
    stored.pages[1].discard()
    assert stored.pool.nbytes == stored.pages[0].nbytes
    assert not stored.arenas[1].bytes().any()


def test_nothing_goes_of_a_pinned_layer(tmp_path):
    stored = Stored(tmp_path / "file", 2, PAGES + 4)
    stored.read(0)
    stored.pages[0].pin()
    assert not stored.read(1)
    assert stored.pool.shrink(PAGE) == 0
    assert stored.holds(0)
    stored.pages[0].unpin()
    assert stored.pool.shrink(PAGE) == PAGE
    assert stored.read(1)


def test_a_page_that_changed_is_an_error_with_the_name_of_its_file(tmp_path):
    stored = Stored(tmp_path / "file", 2, 2 * PAGES)
    good = stored.path.read_bytes()
    at = PAGES * PAGE + 5 * PAGE + 9
    stored.path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    stored.pages[1].take_all()
    with pytest.raises(OSError, match="block 2 of layer 1 does not match") as caught:
        stored.pages[1].read()
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(stored.path))
    assert stored.pages[1].nbytes == 0
    stored.path.write_bytes(good[:-1])
    stored.pages[0].take_all()
    with pytest.raises(OSError, match="bytes of the"):
        stored.pages[0].read()
    stored.path.write_bytes(good)
    assert stored.read(1)
    assert stored.holds(1)


def test_what_was_taken_and_not_read_is_given_back(tmp_path):
    stored = Stored(tmp_path / "file", 1, PAGES)
    assert stored.pages[0].take_all()
    stored.pages[0].give_up()
    assert stored.pool.nbytes == 0
    assert stored.pages[0].missing_nbytes == PAGES * PAGE


def test_threads_that_read_in_turns_keep_to_the_room(tmp_path):
    stored, wrong = Stored(tmp_path / "file", 4, 2 * PAGES + 5), []

    def read(number):
        for _ in range(20):
            stored.pages[number].pin()
            if stored.read(number) and not stored.holds(number):
                wrong.append(number)
            if stored.pool.nbytes > (2 * PAGES + 5) * PAGE:
                wrong.append("room")
            stored.pages[number].unpin()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


@pytest.mark.parametrize(("begin", "unit"), [(1, PAGE), (0, 100), (0, 5 * PAGE)])
def test_wrong_places_are_refused(tmp_path, begin, unit):
    pool, arena = _native.PagePool(), Arena(PAGES * PAGE, plain=True)
    with pytest.raises(ValueError, match="expected"):
        _native.LayerPages(pool, arena.address + begin, PAGES * PAGE, unit, "f", 1, 0, 0, PAGE, unit, np.zeros(PAGES, np.uint32))


class Asked(Stored):
    """The same in no file: whoever reads calls back."""

    def open(self, number):
        self.raises, self.calls = None, 0
        starts = np.array([page.ctypes.data for page in self.data[number]], np.uint64)
        sums = np.empty(PAGES, np.uint32)
        _native.crc32c(starts, PAGE, sums)
        place = "the store", self.data.nbytes, number * PAGES * PAGE, number, 2 * PAGE
        return _native.LayerPages(self.pool, self.arenas[number].address, PAGES * PAGE, PAGE, *place, PAGE, sums, self.fill)

    def fill(self, offsets, addresses):
        assert offsets.dtype == addresses.dtype == np.uint64
        self.calls += 1
        if self.raises is not None:
            raise self.raises
        for offset, address in zip(offsets.tolist(), addresses.tolist(), strict=True):
            ctypes.memmove(address, self.data.ctypes.data + offset, PAGE)


def test_pages_of_what_is_no_file_are_called_for(tmp_path):
    stored = Asked(tmp_path / "file", 2, 2 * PAGES)
    wrong = []

    def read(number):
        for _ in range(20):
            stored.pages[number].pin()
            if not stored.read(number) or not stored.holds(number):
                wrong.append(number)
            stored.pages[number].unpin()
            stored.pages[number].discard()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (wrong, stored.calls) == ([], 40)
    stored.data[1, 3, 7] ^= 1
    stored.pages[1].take_all()
    with pytest.raises(OSError, match="block 1 of layer 1 does not match its checksum") as raised:
        stored.pages[1].read()
    assert (raised.value.errno, raised.value.filename) == (errno.EBADMSG, "the store")


@pytest.mark.parametrize(
    ("error", "number", "text"),
    [
        (OSError(errno.EBADMSG, "it was changed"), errno.EBADMSG, "it was changed"),
        (ZeroDivisionError("a bug"), errno.EIO, "a bug"),
    ],
)
def test_an_error_of_who_is_called_goes_on_without_a_name(tmp_path, error, number, text):
    stored = Asked(tmp_path / "file", 1, PAGES)
    stored.raises = error
    stored.pages[0].take_all()
    with pytest.raises(OSError, match=text) as raised:
        stored.pages[0].read()
    assert (raised.value.errno, raised.value.strerror, raised.value.filename) == (number, text, "")
    assert stored.pool.nbytes == 0
    stored.raises = None
    assert stored.read(0)
    assert stored.holds(0)


def test_preferred_pages_go_when_nothing_else_can(tmp_path):
    stored = Stored(tmp_path / "file", 2, PAGES + 4)
    best = np.array([3, 4, 11, 23], np.int32)
    for pages in stored.pages:
        pages.prefer(best)
    assert stored.read(0)
    assert stored.pages[0].preferred_nbytes == len(best) * PAGE
    assert stored.read(1)
    there = stored.arenas[0].bytes().reshape(PAGES, PAGE).any(axis=1)
    assert np.flatnonzero(there).tolist() == best.tolist()
    assert stored.pages[0].nbytes == stored.pages[0].preferred_nbytes == len(best) * PAGE
    assert stored.pool.shrink((PAGES - 2) * PAGE) == (PAGES - 2) * PAGE
    assert stored.pages[0].preferred_nbytes + stored.pages[1].preferred_nbytes == 6 * PAGE
    stored.pages[1].discard()
    assert stored.pages[1].preferred_nbytes == 0


def test_all_but_preferred_pages_are_discarded(tmp_path):
    stored = Stored(tmp_path / "file", 1, PAGES)
    assert stored.read(0)
    stored.pages[0].prefer(np.array([0, 5, 6], np.int32))
    stored.pages[0].discard(preferred_too=False)
    there = stored.arenas[0].bytes().reshape(PAGES, PAGE).any(axis=1)
    assert np.flatnonzero(there).tolist() == [0, 5, 6]
    assert stored.read(0)
    assert stored.holds(0)


@pytest.mark.parametrize("unit", [-1, PAGES])
def test_a_page_that_is_none_cannot_be_preferred(tmp_path, unit):
    with pytest.raises(ValueError, match=f"unit {unit} is none of the layer's {PAGES}"):
        Stored(tmp_path / "file", 1, PAGES).pages[0].prefer(np.array([unit], np.int32))
