"""Many pages of a file are read at a time: each where it was asked for, by either way, from any thread and after a fork."""

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb.storage.direct_io as direct_io
from kvdb import _native

PAGE = 4096
PAGES = 300
WAYS = list(_native.ReadWay)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reads") / "pages"
    path.write_bytes(contents().tobytes())
    return path


def contents():
    return np.random.default_rng(3).integers(0, 256, (PAGES, PAGE), np.uint8)


def pages_of(path, pages, way=_native.ReadWay.ring, places=None):
    """These pages of the file, each read to its place of an array; read past the page cache."""
    places = np.arange(len(pages)) if places is None else places
    memory = direct_io.page_aligned(max(1, len(pages)) * PAGE).reshape(-1, PAGE)
    addresses = memory.ctypes.data + PAGE * np.asarray(places, np.uint64)
    with direct_io.open_file(path, os.O_RDONLY, direct=True) as file:
        _native.read_pages(file, PAGE * np.asarray(pages, np.uint64), addresses.astype(np.uint64), way)
    return memory[places]


@given(
    st.lists(st.integers(0, PAGES - 1), max_size=400)
    | st.builds(lambda a, b: [*range(a, PAGES), *range(b)], *2 * [st.integers(0, PAGES)]),
    st.randoms(use_true_random=False),
    st.sampled_from(WAYS),
)
def test_every_page_lies_where_it_was_asked_for(path, pages, random, way):
    places = list(range(len(pages)))
    if random.random() < 0.5:
        random.shuffle(places)
    np.testing.assert_array_equal(pages_of(path, pages, way, places), contents()[pages])


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_ends_before_is_an_error(path, way):
    for pages in ([PAGES], [*range(0, PAGES, 2), PAGES + 7]):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            pages_of(path, pages, way)
    np.testing.assert_array_equal(pages_of(path, [1, 0], way), contents()[[1, 0]])  # nothing of it is left over


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_cannot_be_read_is_an_error(path, way):
    memory = direct_io.page_aligned(2 * PAGE)
    refused = pytest.raises(OSError, match=os.strerror(errno.EBADF))
    with direct_io.open_file(path, os.O_WRONLY, direct=True) as file, refused:
        _native.read_pages(file, np.array([0, 8 * PAGE], np.uint64), memory.ctypes.data + np.array([0, PAGE], np.uint64), way)


def test_calls_of_several_threads_go_on_at_the_same_time(path):
    rng, expected = np.random.default_rng(5), contents()
    asked = [rng.integers(0, PAGES, 200) for _ in range(24)]
    with ThreadPoolExecutor(6) as executor:
        for pages, got in zip(asked, executor.map(lambda pages: pages_of(path, pages), asked), strict=True):
            np.testing.assert_array_equal(got, expected[pages])


def test_no_descriptors_are_kept_but_those_of_queues_at_rest(path):
    pages_of(path, [0, 2])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        pages_of(path, [0, 2])
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_descriptor_for_the_queue_threads_read(path):
    """A child has no queue yet, and here may open nothing more."""
    ran = get_context("fork").Process(target=_read_without_descriptors, args=(path,))
    ran.start()
    ran.join(30)
    assert ran.exitcode == 0


def _read_without_descriptors(path):
    memory = direct_io.page_aligned(2 * PAGE).reshape(2, PAGE)
    pages = np.array([5, 1], np.uint64)
    with direct_io.open_file(path, os.O_RDONLY, direct=True) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        _native.read_pages(file, PAGE * pages, memory.ctypes.data + PAGE * np.arange(2, dtype=np.uint64))
    assert (memory == contents()[pages]).all()


def test_offsets_and_addresses_are_pairs():
    with pytest.raises(ValueError, match="expected one for each of 2 addresses"):
        _native.read_pages(0, np.zeros(1, np.uint64), np.zeros(2, np.uint64))
