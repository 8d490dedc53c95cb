"""What `kvdb.storage.segment_store` says that every store promises, tried on each of `object_stores.STORES`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import kvdb.storage.segment_head as segment_head
from kvdb.errors import AlreadyExists, CapacityError, IntegrityError, NotFound, Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.direct_io import PAGE, page_aligned
from kvdb.storage.disk import DiskTier
from kvdb.storage.paged_segment import PagedSegment, pinned
from kvdb.storage.stored_segment import StoredSegment
from tests.kvdb.storage.blocks import CRUMBS, PAGES, Stored
from tests.kvdb.storage.object_stores import STORES
from tests.racing import race

LAYOUTS = {"pages": PAGES, "crumbs": CRUMBS}
SEGMENTS = [f"{number}.segment" for number in range(3)]
BESIDE = ["0.evidence", "0.flat.1.index", "2.statistics"]


@pytest.fixture(params=STORES)
def tried(request):
    return STORES[request.param]


@pytest.fixture
def store(tried, tmp_path):
    store = tried.new(tmp_path)
    yield store
    store.close()


class Memory:
    """Blocks of random bytes at addresses that begin on pages, in another order than they lie in memory."""

    def __init__(self, blocks, nbytes, seed):
        self.nbytes = nbytes
        self.bytes = page_aligned(blocks * -(-nbytes // PAGE) * PAGE).reshape(blocks, -1)
        rng = np.random.default_rng(seed)
        self.bytes[:, :nbytes] = rng.integers(0, 256, (blocks, nbytes), np.uint8)
        self.bytes = self.bytes[rng.permutation(blocks)]
        self.kept = page_aligned(self.bytes.size).reshape(self.bytes.shape)  # a copy that begins on a page
        self.kept[:] = self.bytes

    @property
    def addresses(self):
        return self.kept.ctypes.data + self.kept.shape[1] * np.arange(len(self.kept), dtype=np.uint64)

    def content(self):
        return self.kept[:, : self.nbytes].tobytes()


def begun(store, key, memory, *, whole_pages=True):
    """A writer of an object that holds what is in memory, to which all of it was written."""
    writer = store.begin(key, len(memory.content()), whole_pages=whole_pages)
    writer.write(0, memory.addresses, memory.nbytes)
    return writer


def read(store, key, at, nbytes):
    """Bytes of an object, in a block of one byte too many, which has to stay."""
    with store.open(key, whole_pages=False) as reader:
        into = np.full(nbytes + 1, 77, np.uint8)
        count = reader.read(at, np.array([into.ctypes.data], np.uint64), nbytes)
        assert reader.read_bytes(at, nbytes) == into[:count].tobytes()
    assert (into[count:] == 77).all(), "more was filled than was said"
    return into[:count].tobytes()


class Objects(RuleBasedStateMachine):
    """Objects come and go in any order, and a dictionary says what must be there."""

    tried = STORES["memory"]
    folder = None

    def __init__(self):
        super().__init__()
        self.count = 0
        self.store = self.tried.new(type(self).folder())
        self.kept, self.marks, self.begun = {}, {}, {}

    @rule(key=st.sampled_from(SEGMENTS), blocks=st.integers(1, 5), nbytes=st.sampled_from([PAGE, 2 * PAGE, 100]), data=st.data())
    def begin(self, key, blocks, nbytes, data):
        whole = not nbytes % PAGE and data.draw(st.booleans())
        if key in self.kept or key in self.begun:
            with pytest.raises(AlreadyExists):
                self.store.begin(key, blocks * nbytes, whole_pages=whole)
            return
        self.count += 1
        memory = Memory(blocks, nbytes, self.count)
        writer = self.store.begin(key, blocks * nbytes, whole_pages=whole)
        self.begun[key] = writer, memory, data.draw(st.permutations(range(blocks))), bytearray(blocks * nbytes)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), count=st.integers(1, 3))
    def write(self, data, count):
        """Write some blocks, each by itself; none of them twice."""
        writer, memory, left, content = self.begun[data.draw(st.sampled_from(sorted(self.begun)))]
        for block in [left.pop() for _ in range(min(count, len(left)))]:
            at = block * memory.nbytes
            writer.write(at, memory.addresses[block : block + 1], memory.nbytes)
            content[at : at + memory.nbytes] = memory.content()[at : at + memory.nbytes]

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), mark=st.sampled_from(["", "a 1"]), synced=st.booleans())
    def finish(self, data, mark, synced):
        """Also where not all was written: the rest is zeros."""
        key = data.draw(st.sampled_from(sorted(self.begun)))
        writer, _, _, content = self.begun.pop(key)
        writer.finish(mark, synced=synced)
        writer.abandon()
        self.kept[key], self.marks[key] = bytes(content), mark

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def abandon(self, data):
        writer = self.begun.pop(data.draw(st.sampled_from(sorted(self.begun))))[0]
        writer.abandon()
        writer.abandon()

    @rule(key=st.sampled_from(BESIDE), content=st.binary(max_size=40), saved=st.booleans())
    def put(self, key, content, saved):
        if saved:
            with self.store.saving(key) as path:
                path.write_bytes(content)
        else:
            self.store.put(key, content)
        self.kept[key], self.marks[key] = content, self.marks.get(key, "")

    @rule(key=st.sampled_from(BESIDE))
    def fail_to_save(self, key):
        def half(path):
            path.write_bytes(b"half of")
            raise CapacityError("there is no room for the other half")

        with pytest.raises(CapacityError, match="no room"), self.store.saving(key) as path:
            half(path)
        self.store.remove(key)  # what was there before may be gone
        self.kept.pop(key, None)

    @rule(key=st.sampled_from([*SEGMENTS, *BESIDE]))
    def remove(self, key):
        self.store.remove(key)
        self.kept.pop(key, None)

    @precondition(lambda self: self.kept.keys() & set(SEGMENTS))
    @rule(data=st.data(), text=st.sampled_from(["", "b 22"]))
    def mark(self, data, text):
        key = data.draw(st.sampled_from(sorted(self.kept.keys() & set(SEGMENTS))))
        self.store.mark(key, text)
        self.marks[key] = text

    @rule(key=st.sampled_from([*SEGMENTS, *BESIDE]), at=st.integers(0, 5 * PAGE), nbytes=st.integers(1, 6 * PAGE))
    def read(self, key, at, nbytes):
        content = self.kept.get(key)
        assert self.store.get(key) == content
        if content is not None:
            assert read(self.store, key, at, nbytes) == content[at : at + nbytes]
            with self.store.local(key) as path:
                assert path.read_bytes() == content
            file = self.store.file(key)
            assert file is None or file.read_bytes() == content
            return
        with pytest.raises(Unavailable), self.store.open(key, whole_pages=False):
            pass
        with pytest.raises(NotFound), self.store.local(key) as path:
            path.read_bytes()

    @rule()
    def sync(self):
        self.store.sync()

    @precondition(lambda self: not self.begun)
    @rule()
    def begin_again(self):
        self.store.sync()
        self.store.close()
        self.store = self.tried.again(self.store)

    @invariant()
    def it_lists_what_is_there(self):
        begun = {f".{key}": len(content) for key, (*_, content) in self.begun.items()}
        assert self.store.list() == begun | {key: len(content) for key, content in self.kept.items()}
        for key in self.kept.keys() & set(SEGMENTS):
            assert self.store.marked(key) in {self.marks[key], ""}  # a store need not have any

    def teardown(self):
        for writer, *_ in self.begun.values():
            writer.abandon()
        self.store.close()


@pytest.mark.parametrize("name", STORES)
def test_objects_come_and_go_in_any_order(name, tmp_path_factory):
    machine = type("Machine", (Objects,), {"tried": STORES[name], "folder": lambda: tmp_path_factory.mktemp("objects")})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30, suppress_health_check=list(HealthCheck)))


def test_blocks_are_written_from_where_they_lie_and_read_to_where_they_belong(store):
    for whole, nbytes in ((True, 2 * PAGE), (False, 100)):
        memory, key = Memory(7, nbytes, seed=nbytes), f"{nbytes}.segment"
        begun(store, key, memory, whole_pages=whole).finish("", synced=True)
        into = Memory(7, nbytes, seed=0)
        with store.open(key, whole_pages=whole) as reader:
            assert reader.nbytes == 7 * nbytes
            assert reader.read(nbytes, into.addresses[::-1].copy()[:6], nbytes) == 6 * nbytes
        assert into.content()[nbytes:] == b"".join(memory.content()[at : at + nbytes] for at in range(6 * nbytes, 0, -nbytes))


def test_many_threads_write_one_object_and_many_read_it(store):
    memory, order = Memory(64, PAGE, seed=1), np.random.default_rng(0).permutation(64).tolist()
    with ThreadPoolExecutor(8) as threads:
        writer = store.begin("0.segment", 64 * PAGE, whole_pages=True)
        list(threads.map(lambda i: writer.write(i * PAGE, memory.addresses[i : i + 1], PAGE), order))
        writer.finish("", synced=False)
        into = Memory(64, PAGE, seed=2)
        with store.open("0.segment", whole_pages=True) as reader:
            list(threads.map(lambda i: reader.read(i * PAGE, into.addresses[i : i + 1], PAGE), range(64)))
    assert into.content() == memory.content()


def test_an_object_that_is_begun_is_nobodys_to_read(store):
    writer = begun(store, "0.segment", Memory(2, PAGE, seed=0))
    assert store.get("0.segment") is None
    assert "0.segment" not in store.list()
    with pytest.raises(Unavailable, match=store.where), store.open("0.segment", whole_pages=True):
        pass
    writer.abandon()
    assert store.list() == {}


def test_what_a_dead_process_began_is_never_there(tried, tmp_path):
    """And what it leaves behind, if anything, is listed with a dot, and can be removed."""
    store = tried.new(tmp_path)
    begun(store, "0.segment", Memory(2, PAGE, seed=0))
    left = tried.again(store)
    assert left.get("0.segment") is None
    assert set(left.list()) <= {".0.segment"}
    left.remove(".0.segment")
    assert tried.again(left).get("0.segment") is None


def test_keys_come_and_go_while_they_are_listed_and_read(store):
    memory = Memory(3, PAGE, seed=0)

    def come_and_go():
        begun(store, "0.segment", memory).finish("a", synced=False)
        store.put("0.evidence", b"proven")
        store.remove("0.evidence")
        store.remove("0.segment")

    def look():
        assert store.list().get("0.segment", 3 * PAGE) == 3 * PAGE
        assert store.get("0.segment") in {None, memory.content()}
        try:
            found = read(store, "0.segment", PAGE, PAGE)
        except Unavailable:
            return
        assert found == memory.content()[PAGE : 2 * PAGE]

    race(look, look, come_and_go)


class Kept:
    """A tier over a store, with one segment of random tokens."""

    def __init__(self, store, layout=PAGES, tokens=50, seed=0):
        self.store, self.stored = store, Stored(layout, tokens=tokens, seed=seed, dirty=True)
        self.tier = DiskTier(store, None)

    def write(self):
        return self.tier.write("digest", self.stored.tokens, self.stored.tables)

    def holds(self, segment):
        """Whether every layer comes back, into tables with remains in them."""
        tables = self.stored.empty()
        for layer in (2, 0, 1):
            segment.read_layer(layer, tables[layer])
        return all(self.stored.holds(table, layer) for layer, table in enumerate(tables))

    def close(self):
        self.tier.close()
        self.stored.close()


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 70), st.sampled_from([1, 1 << 14, 4 << 20]), st.data())
@pytest.mark.parametrize("name", STORES)
def test_segments_are_written_as_they_come_and_found_again(tmp_path_factory, name, layout, tokens, piece, data):
    """Begun, continued in any order of layers, finished or given up, removed; and the tier counts what is there."""
    kept = Kept(STORES[name].new(tmp_path_factory.mktemp("segments")), LAYOUTS[layout], tokens)
    stored, there, nbytes = kept.stored, [], kept.stored.contents("x").nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_head, "PIECE_BYTES", piece)
        for end in data.draw(st.lists(st.sampled_from(["finish", "abandon", "remove"]), max_size=4)):
            writing = kept.tier.begin("digest", stored.layers * (stored.layout,), tokens)
            tables = [BlockTable(stored.tier, stored.layout) for _ in range(stored.layers)]
            order = data.draw(st.permutations([*range(stored.layers)] * 2))
            for layer in order:
                start = tables[layer].length
                stop = tokens if start else max(1, tokens // 2)
                tables[layer].append(*(side[:, start:stop] for side in stored.kv[layer]))
                writing.take(layer, tables[layer])
            if end == "abandon":
                kept.tier.abandon(writing)
            else:
                there.append(kept.tier.finish(writing, tables, synced=data.draw(st.booleans())))
            for table in tables:
                table.release()
            if end == "remove":
                kept.tier.remove(there.pop(data.draw(st.integers(0, len(there) - 1))))
            kept.tier.check_integrity(there)
            assert abs(kept.tier.nbytes - len(there) * nbytes) <= len(there) * PAGE  # the head has a longer key
    for segment in there:
        again = StoredSegment.adopt(STORES[name].again(kept.store), segment.key, segment.contents, segment.digest)
        again.verify()
        assert kept.holds(again)
    kept.close()


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, (1 << 30) - 1), st.integers(0, 7))
@pytest.mark.parametrize("name", STORES)
def test_no_changed_byte_is_served(tmp_path_factory, name, layout, at, bit):
    tried = STORES[name]
    kept = Kept(tried.new(tmp_path_factory.mktemp("damaged")), LAYOUTS[layout])
    segment = kept.write()
    content = bytearray(kept.store.get(segment.key))
    at %= len(content)
    content[at] ^= 1 << bit
    tried.overwrite(kept.store, segment.key, bytes(content))
    fresh = StoredSegment(kept.store, segment.key, segment.contents, segment.digest)
    in_layer, contents = at - segment.contents.extents_at, segment.contents
    extent = contents.extents[0]
    summed = in_layer % extent.nbytes < extent.blocks * extent.layout.nbytes
    padding = in_layer < 0 and at >= segment_head.HEAD_AT + contents.head_nbytes
    if padding or (in_layer >= 0 and not summed):  # what fills up is read by nobody
        fresh.verify()
        assert kept.holds(fresh)
    else:
        with pytest.raises(IntegrityError, match="its head is not" if in_layer < 0 else "does not match its checksum"):
            fresh.verify()
        with pytest.raises(IntegrityError):
            kept.holds(fresh)
    kept.close()


def test_a_segment_that_was_cut_short_or_has_grown_is_found(tried, store):
    kept = Kept(store)
    segment = kept.write()
    content = store.get(segment.key)
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        tried.overwrite(store, segment.key, changed)
        with pytest.raises(IntegrityError, match=f"it has {len(changed):,} bytes"):
            kept.holds(segment)
    tried.overwrite(store, segment.key, content)
    assert kept.holds(segment)
    kept.close()


def test_a_segment_that_is_gone_is_unavailable(store):
    kept = Kept(store)
    segment = kept.write()
    store.remove(segment.key)
    for read_it in (lambda: kept.holds(segment), segment.verify):
        with pytest.raises(Unavailable, match="make it readable again, or drop the contexts"):
            read_it()
    kept.close()


def test_pages_of_a_segment_come_when_they_are_asked_for(tried, store):
    """Whether native code reads a file by itself or asks the store; and what was changed is not served."""
    kept, pool = Kept(store, tokens=400), BufferPool(CpuBudget(1 << 20))
    segment = kept.write()

    def opened():
        paged = PagedSegment(pool, segment, [BlockTable(kept.stored.tier, PAGES) for _ in range(kept.stored.layers)])
        pool.open(paged)
        return paged

    def closed(paged):
        pool.close(paged)
        pool.drop(paged)

    paged = opened()
    for number, layer in enumerate(paged.layers):
        with pinned([layer]):
            assert kept.stored.holds(layer.table, number)
    closed(paged)
    content = store.get(segment.key)
    at = segment.contents.extents[1].at + 5000
    tried.overwrite(store, segment.key, content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
    paged = opened()
    with pytest.raises(IntegrityError, match="block 0 of layer 1 does not match its checksum"), pinned([paged.layers[1]]):
        pass
    closed(paged)
    store.remove(segment.key)
    paged = opened()
    with pytest.raises(Unavailable, match="cannot be read"), pinned([paged.layers[2]]):
        pass
    closed(paged)
    pool.shut_down()
    for tier in pool.tiers:
        tier.close()
    kept.close()


def test_keys_that_others_have_are_never_written_over(store):
    kept = Kept(store)
    memory = Memory(1, PAGE, seed=3)
    begun(store, "0.segment", memory).finish("", synced=True)
    segment = kept.write()
    assert segment.key == "1.segment"
    assert store.get("0.segment") == memory.content()
    kept.close()


def test_segments_come_and_go_from_many_threads(store):
    kept = Kept(store)

    def one():
        segment = kept.write()
        assert kept.tier.read_beside(segment, ".evidence") is None
        kept.tier.write_beside(segment, ".evidence", b"proven")
        assert kept.tier.read_beside(segment, ".evidence") == b"proven"
        kept.tier.remove(segment)

    race(one, one, kept.tier.stats)
    kept.tier.check_integrity([])
    assert (kept.tier.nbytes, store.list()) == (0, {})
    assert threading.active_count() < 100
    kept.close()


class Failing:
    """A writer of whose calls one fails."""

    def __init__(self, writer, what, error):
        self.writer, self.what, self.error = writer, what, error

    def write(self, at, addresses, nbytes):
        if self.what == "write" and at:
            raise self.error
        self.writer.write(at, addresses, nbytes)

    def finish(self, mark, *, synced):
        if self.what == "finish":
            raise self.error
        self.writer.finish(mark, synced=synced)

    def abandon(self):
        self.writer.abandon()


@pytest.mark.parametrize("what", ["begin", "write", "finish"])
@pytest.mark.parametrize("error", [CapacityError("there is no room; buy some"), Unavailable("nobody answers; try again")])
def test_of_a_segment_that_cannot_be_written_nothing_is_left(store, monkeypatch, what, error):
    kept, begin = Kept(store), store.begin
    first = kept.write()

    def failing(*given, **named):
        if what == "begin":
            raise error
        return Failing(begin(*given, **named), what, error)

    with monkeypatch.context() as patch:
        patch.setattr(store, "begin", failing)
        with pytest.raises(type(error), match=str(error)):
            kept.write()
    kept.tier.check_integrity([first])
    assert (kept.tier.nbytes, list(store.list())) == (first.nbytes, [first.key])
    assert kept.holds(first)
    assert kept.holds(kept.write())
    kept.close()
