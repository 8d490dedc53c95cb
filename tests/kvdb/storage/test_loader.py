"""Layers come in order, each is there when it is waited for, and what goes wrong reaches whoever waits."""

import threading

import pytest

from kvdb.errors import IntegrityError, InternalError, Unavailable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.loader import Loader
from tests.kvdb.storage.blocks import Stored
from tests.waiting import until


class Gated:
    """A file that reads a layer only when it is let; `begun` tells the layers in the order of their reading."""

    def __init__(self, file, begun, *, name=""):
        self.file, self.begun, self.name = file, begun, name
        self.gate = threading.Semaphore(0)
        self.reading = threading.Event()

    def read_layer(self, layer, table):
        self.begun.append((self.name, layer))
        self.reading.set()
        assert self.gate.acquire(timeout=10)
        self.file.read_layer(layer, table)

    def let(self, layers):
        self.gate.release(layers)

    def let_once_given_up(self, loading):
        """Let the layer under way be read to its end as soon as nobody wants it any more, which whoever gives it up waits for."""

        def let():
            until(lambda: loading.ended)
            assert len(self.begun) == 1
            self.let(1)

        threading.Thread(target=let).start()


@pytest.fixture
def stored():
    stored = Stored(layers=4)
    yield stored
    stored.close()


@pytest.fixture
def loader():
    loader = Loader(BufferPool(CpuBudget(None)))
    yield loader
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-load")]


def test_every_layer_that_was_waited_for_is_there(tmp_path, stored, loader):
    file = stored.write(tmp_path / "0.segment")
    assert loader.rate is None
    for _ in range(3):
        tables = stored.empty()
        loading = loader.load(file, tables)
        for layer in range(4):
            loading.wait(layer)
            assert stored.holds(tables[layer], layer)
        assert loading.ended
    assert loader.rate > 0


def test_a_layer_can_be_used_while_later_ones_are_still_read(tmp_path, stored, loader):
    file = Gated(stored.write(tmp_path / "0.segment"), [])
    tables = stored.empty()
    loading = loader.load(file, tables)
    file.let(1)
    loading.wait(0)
    assert stored.holds(tables[0], 0)
    assert (loading.ready, loading.ended) == (1, False)
    file.let(3)
    loading.wait(3)


def test_of_many_segments_the_first_layers_come_first(tmp_path, stored, loader):
    begun = []
    files = [Gated(stored.write(tmp_path / f"{i}.segment"), begun, name=i) for i in range(3)]
    loadings = [loader.load(files[0], stored.empty())]
    assert files[0].reading.wait(10)  # only then are there others to choose from
    loadings += [loader.load(file, stored.empty()) for file in files[1:]]
    for file in files:
        file.let(4)
    until(lambda: all(loading.ended for loading in loadings))
    assert begun == [(name, layer) for layer in range(4) for name in range(3)]


def test_what_somebody_waits_for_comes_before_the_rest(tmp_path, stored, loader):
    begun = []
    busy, wanted = (Gated(stored.write(tmp_path / f"{i}.segment"), begun, name=i) for i in range(2))
    first = loader.load(busy, stored.empty())
    assert busy.reading.wait(10)
    second = loader.load(wanted, stored.empty(), ready=2)
    waiter = threading.Thread(target=second.wait, args=(3,))
    waiter.start()
    until(lambda: second.waiters)
    busy.let(4)
    wanted.let(2)
    waiter.join(10)
    first.wait(3)
    assert begun == [(0, 0), (1, 2), (1, 3), (0, 1), (0, 2), (0, 3)]


def test_a_wrong_byte_reaches_whoever_waits_and_layers_before_it_are_good(tmp_path, stored, loader):
    file = stored.write(tmp_path / "0.segment")
    with (tmp_path / "0.segment").open("r+b") as raw:
        raw.seek(file.contents.extents[2].at + 99)
        byte = raw.read(1)[0]
        raw.seek(-1, 1)
        raw.write(bytes([byte ^ 4]))
    tables = stored.empty()
    loading = loader.load(file, tables)
    for layer in (2, 3, 2):
        with pytest.raises(IntegrityError, match="of layer 2 does not match"):
            loading.wait(layer)
    loading.wait(1)
    assert stored.holds(tables[1], 1)
    good = stored.write(tmp_path / "1.segment")
    again = loader.load(good, tables, ready=loading.ready)
    again.wait(3)
    assert stored.holds(tables[2], 2)


def test_nothing_is_written_to_the_blocks_once_a_loading_was_given_up(tmp_path, stored, loader):
    begun = []
    file = Gated(stored.write(tmp_path / "0.segment"), begun)
    loading = loader.load(file, stored.empty())
    assert file.reading.wait(10)
    file.let_once_given_up(loading)
    loader.cancel(loading)
    assert loading.ended
    with pytest.raises(Unavailable, match="given up"):
        loading.wait(1)
    assert begun == [("", 0)]
    loader.cancel(loading)


def test_closing_stops_after_the_layer_under_way(tmp_path, stored):
    loader, begun = Loader(BufferPool(CpuBudget(None))), []
    file = Gated(stored.write(tmp_path / "0.segment"), begun)
    loadings = [loader.load(file, stored.empty()) for _ in range(2)]
    assert file.reading.wait(10)
    file.let_once_given_up(loadings[-1])
    loader.close()
    assert len(begun) == 1
    for loading in loadings:
        with pytest.raises(Unavailable, match="closed"):
            loading.wait(3)
    with pytest.raises(Unavailable, match="closed"):
        loader.load(file, stored.empty())
    loader.close()


def test_a_bug_of_ours_reaches_whoever_waits_and_the_loader_goes_on(tmp_path, stored, loader, caplog):
    class Broken:
        def read_layer(self, layer, table):
            raise ZeroDivisionError

    with pytest.raises(InternalError, match="ZeroDivisionError"):
        loader.load(Broken(), stored.empty()).wait(0)
    assert "has died" in caplog.text
    loader.load(stored.write(tmp_path / "0.segment"), stored.empty()).wait(3)


def test_many_threads_wait_for_many_segments(tmp_path, stored, loader):
    file = stored.write(tmp_path / "0.segment")
    loadings = [(loader.load(file, tables), tables) for tables in [stored.empty() for _ in range(8)]]
    wrong = []

    def follow(loading, tables):
        for layer in range(4):
            loading.wait(layer)
            if not stored.holds(tables[layer], layer):
                wrong.append(layer)

    threads = [threading.Thread(target=follow, args=pair) for pair in loadings for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not wrong
