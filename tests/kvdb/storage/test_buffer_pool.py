"""Layers come in when they are pinned, stay as long, and make room for each other within the budget."""

import threading

import pytest

from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.events import Kind
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.cpu import CpuTier
from kvdb.storage.paged_segment import PagedSegment, pinned
from tests.kvdb.storage.blocks import PAGES, Stored
from tests.waiting import until

LAYERS, TOKENS = 4, 256
LAYER_NBYTES = PAGES.blocks_for(TOKENS) * PAGES.nbytes


class Paged:
    """A stored segment in a pool that has room for `room` layers. budget: of the pool."""

    def __init__(self, folder, room, layers=LAYERS):
        self.stored = Stored(PAGES, layers=layers, tokens=TOKENS)
        self.budget = CpuBudget(int(room * LAYER_NBYTES))
        self.pool = BufferPool(self.budget)
        self.home = CpuTier(PAGES.nbytes, 1 << 20, self.budget)
        self.path = folder / f"{id(self)}.segment"
        self.file = self.stored.write(self.path)
        self.segments = []

    def segment(self):
        segment = PagedSegment(self.pool, self.file, [BlockTable(self.home, PAGES) for _ in range(self.stored.layers)])
        self.pool.open(segment)
        self.segments.append(segment)
        return segment

    def resident(self):
        """How many layers take memory, once nothing is under way."""
        until(lambda: not any(layer.loading for segment in self.segments for layer in segment.layers))
        return sum(layer.resident for segment in self.segments for layer in segment.layers)

    def close(self):
        for segment in self.segments:
            self.pool.close(segment)
            self.pool.drop(segment)
        self.pool.shut_down()
        for tier in (*self.pool.tiers, self.home):
            tier.check_integrity([])
            tier.close()
        assert self.budget.left == self.budget.limit
        self.stored.close()


@pytest.fixture
def paged(tmp_path):
    paged = Paged(tmp_path, 2.5)
    yield paged
    paged.close()


def test_a_pinned_layer_holds_its_tokens_however_often_it_left(paged):
    segment = paged.segment()
    for _ in range(3):
        for number, layer in enumerate(segment.layers):
            with pinned([layer]):
                assert paged.stored.holds(layer.table, number)
            assert paged.resident() <= 2


def test_the_addresses_of_a_layer_stay(paged):
    segment = paged.segment()
    before = [layer.table.addresses.copy() for layer in segment.layers]
    for layer in segment.layers * 2:
        with pinned([layer]):
            pass
    assert all((layer.table.addresses == addresses).all() for layer, addresses in zip(segment.layers, before, strict=True))


def test_the_next_layer_is_read_ahead(paged):
    segment = paged.segment()
    with pinned([segment.layers[1]]):
        until(lambda: segment.layers[2].resident)
    assert not segment.layers[3].resident


def test_a_call_waits_for_what_others_have_pinned(paged):
    segment, other = paged.segment(), paged.segment()
    came = threading.Event()

    def pin():
        with pinned(other.layers[:2]):
            came.set()

    with pinned(segment.layers[:1]):
        thread = threading.Thread(target=pin)
        thread.start()
        assert not came.wait(0.05)
        assert not any(layer.pins for layer in other.layers), "it holds nothing while it waits"
    assert came.wait(20)
    thread.join(20)


def test_what_can_never_fit_is_a_capacity_error_at_once(paged):
    segment = paged.segment()
    with pytest.raises(CapacityError, match="bytes of one layer have to be read from disk"), pinned(segment.layers[:3]):
        pass
    assert not any(layer.pins for layer in segment.layers)
    with pinned(segment.layers[:2]):
        pass


def test_who_waits_is_told_that_the_pool_ends(paged):
    segment, other = paged.segment(), paged.segment()
    said = []

    def pin():
        try:
            with pinned(other.layers[:2]):
                pass
        except Unavailable as error:
            said.append(error)

    with pinned(segment.layers[:1]):
        thread = threading.Thread(target=pin)
        thread.start()
        paged.pool.shut_down()
        thread.join(20)
    assert said


def test_a_layer_that_cannot_be_read_takes_no_memory_and_is_tried_again(paged):
    segment, path = paged.segment(), paged.path
    good = path.read_bytes()
    path.write_bytes(good[:-100] + b"x" * 100)
    told = []
    paged.pool.events.add(told.append)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="of layer 3 does not match its checksum"), pinned(segment.layers[3:]):
            pass
        assert not segment.layers[3].resident
    assert [event.kind for event in told] == [Kind.CHECKSUM_FAILED] * 2
    path.write_bytes(good)
    with pinned(segment.layers[3:]):
        assert paged.stored.holds(segment.layers[3].table, 3)


def test_other_tiers_get_the_room_of_what_nobody_reads_but_not_what_is_reserved(paged):
    segment = paged.segment()
    for layer in segment.layers:
        with pinned([layer]):
            pass
    assert paged.resident() == 2
    table = BlockTable(paged.home, PAGES)
    table.reserve(TOKENS)
    assert paged.resident() == 1, "no more went than was missing"
    with pytest.raises(CapacityError):
        BlockTable(paged.home, PAGES).reserve(TOKENS)
    with pinned(segment.layers[2:3]):
        assert paged.stored.holds(segment.layers[2].table, 2)
    table.release()


def test_a_segment_without_room_for_one_layer_is_not_opened(tmp_path):
    paged = Paged(tmp_path, 0.5)
    with pytest.raises(CapacityError):
        paged.segment()
    paged.pool.shut_down()
    paged.home.close()
    paged.stored.close()


def test_in_a_circle_only_what_does_not_fit_is_read_again(tmp_path):
    large = Paged(tmp_path, 4.2, layers=8)
    segment, reads = large.segment(), []
    for layer in segment.layers:
        read = layer.read
        layer.read = lambda read=read, number=layer.number: (reads.append(number), read())
    rounds = 6
    for _ in range(rounds):
        for layer in segment.layers:
            with pinned([layer]):
                large.resident()
    assert len(reads) <= 8 + (rounds - 1) * 6, "two of the four stay, two pass by"
    large.close()
