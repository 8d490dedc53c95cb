"""Builds on a device: against float64, streamed, and when the device fails in between."""

import gc
import logging
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvdb.database.components
import kvdb.gpu.index_build.accelerator as building_on_device
import kvdb.gpu.index_build.knn as knn
import kvdb.gpu.index_build.knn_choice as knn_choice
from indexes.accelerate import AcceleratorLost, KMeans
from indexes.coarse.clusters import Clusters
from indexes.hnsw import Hnsw
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError
from kvdb.gpu.device import open_device
from kvdb.gpu.index_build.accelerator import DeviceAccelerator
from kvdb.gpu.opening import open_accelerator
from kvdb.gpu.streams import ImmediateStream
from tests.indexes.accelerator import Plain
from tests.indexes.coarse_data import Layer

WHERE = "cuda" if torch.cuda.is_available() else "interpreter"
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TILE = 1 << 16
TOO_FULL = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"
FAILED = RuntimeError, "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def device():
    opened = open_device(WHERE)
    yield opened
    assert not opened.staging._under_way or opened.lost or WHERE == "cuda"
    opened.close()


def keys_of(n, d=24, seed=0, dtype="float32", offset=0.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) + offset * rng.standard_normal(d)).astype(DTYPES[dtype])


def check_scores(found, scores, k):
    """Whether each row has the k largest of float64 scores, largest first, to rounding; -inf and -1 for none."""
    assert found.dtype == np.int32
    ranked = -np.sort(-scores, axis=1)[:, :k]
    had = np.where(found >= 0, np.take_along_axis(scores, np.maximum(found, 0), 1), -np.inf)
    slack = 3e-6 * max(np.abs(scores[np.isfinite(scores)]).max(initial=0), 1)
    np.testing.assert_allclose(had, ranked, rtol=0, atol=slack)
    for row in found:
        assert len(set(row[row >= 0].tolist())) == (row >= 0).sum()


def distances_before(keys):
    """float64 `[n, n]`: a.b - |b| ** 2 / 2, -inf where b does not come before a."""
    x = keys.astype(np.float64)
    scores = x @ x.T - np.square(x).sum(1) / 2
    scores[np.triu_indices(len(x))] = -np.inf
    return scores


@given(
    n=st.integers(1, 700),
    m=st.integers(1, 40),
    k=st.integers(1, 120),
    dtype=st.sampled_from(sorted(DTYPES)),
    tile=st.sampled_from([4, 5000, TILE]),
    columns=st.sampled_from([64, 257, 131_072]),
)
def test_neighbours_are_those_of_float64(n, m, k, dtype, tile, columns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "COLUMNS", columns)
        accelerator = DeviceAccelerator(open_device(WHERE), tile)
        heads = [(keys_of(n, seed=i, dtype=dtype), keys_of(m, seed=9 + i, dtype=("float32", dtype)[i % 2])) for i in range(3)]
        found = list(accelerator.neighbours(iter(heads), k))
        assert len(found) == 3
        for (keys, queries), mine in zip(heads, found, strict=True):
            assert mine.shape == (m, min(k, n))
            check_scores(mine, queries.astype(np.float64) @ keys.astype(np.float64).T, k)


@given(
    n=st.integers(0, 500),
    k=st.integers(1, 70),
    dtype=st.sampled_from(sorted(DTYPES)),
    tile=st.sampled_from([4, 5000, TILE, 1 << 21]),
    columns=st.sampled_from([64, 257, 131_072]),
    offset=st.sampled_from([0.0, 8.0]),
)
def test_the_nearest_before_are_those_of_float64(n, k, dtype, tile, columns, offset):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "COLUMNS", columns)
        heads = [keys_of(n, seed=i, dtype=dtype, offset=offset) for i in range(2)]
        found = list(DeviceAccelerator(open_device(WHERE), tile).nearest_before(iter(heads), k))
        for keys, mine in zip(heads, found, strict=True):
            assert mine.shape == (n, k)
            wide = np.full((n, k + 1), -np.inf)  # so that rows are as long as k
            check_scores(mine, np.hstack([distances_before(keys), wide]), k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_half_precision_holds_lengths_to_the_precision_of_float32(dtype, offset):
    """What a card multiplies, multiplied here in float64."""
    keys = keys_of(300, 128, dtype=dtype, offset=offset)
    there = torch.from_numpy(keys.view(np.int16)).view(getattr(torch, dtype))
    rows, columns = knn._with_lengths(there)
    assert rows.dtype == columns.dtype == there.dtype
    product = rows.double() @ columns.double().T
    x = keys.astype(np.float64)
    expected = x @ x.T - np.square(x).sum(1) / 2
    np.testing.assert_allclose(product.numpy(), expected, rtol=0, atol=1e-6 * np.square(x).sum(1).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_finds_the_same_on_a_card(dtype, monkeypatch, device):
    """A card sums products of half precision in float32; here they are widened before."""
    monkeypatch.setattr(knn, "_sums_wide", lambda keys: True)
    monkeypatch.setattr(knn, "_product", lambda rows, columns: rows.float() @ columns.float().T)
    keys = keys_of(400, 64, dtype=dtype, offset=5.0)
    accelerator = DeviceAccelerator(device, TILE)
    (nearest,), (best,) = accelerator.nearest_before([keys], 20), accelerator.neighbours([(keys, keys[:30])], 20)
    check_scores(nearest, np.hstack([distances_before(keys), np.full((400, 20), -np.inf)]), 20)
    check_scores(best, keys[:30].astype(np.float64) @ keys.astype(np.float64).T, 20)


def test_keys_that_are_alike_are_all_found(device):
    keys = np.ones((200, 16), np.float32)
    (nearest,) = DeviceAccelerator(device, TILE).nearest_before([keys], 300)
    for token, row in enumerate(nearest):
        assert set(row[row >= 0].tolist()) == set(range(token))


def test_no_tile_is_larger_than_its_budget(device, monkeypatch):
    sizes, product = [], knn._product

    def watched(rows, columns):
        scores = product(rows, columns)
        sizes.append(scores.nbytes)
        return scores

    monkeypatch.setattr(knn, "_product", watched)
    accelerator = DeviceAccelerator(device, TILE)
    list(accelerator.nearest_before([keys_of(1500)], 8))
    assert max(sizes) <= TILE
    assert np.mean(sizes) > TILE / 4
    list(accelerator.neighbours([(keys_of(1500), keys_of(900))], 8))
    assert max(sizes) <= TILE


@pytest.mark.parametrize("tokens", [64, 1000, 3000])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("far", [0.0, 0.5])
def test_clusters_are_those_of_the_native_build(tokens, dtype, far, device):
    blocks = Layer.of(tokens, dtype, topics=60).blocks
    accelerator = DeviceAccelerator(device, 4 * 1024 * 32 * 2)  # two segments at a time
    mine, theirs = (Clusters.build(blocks, None, 32, 1024, 0.8, 6, far, accelerator=a) for a in (accelerator, None))
    mine.verify()
    same = [a.arrays["members"] == b.arrays["members"] for a, b in zip(mine._batches, theirs._batches, strict=True)]
    assert np.mean(np.concatenate([each.reshape(-1) for each in same])) > 0.95
    assert spread(mine) <= spread(theirs) * 1.01


def spread(index):
    """The sum of squared distances of keys from the means of their clusters."""
    total = 0.0
    for batch in index._batches:
        for segment in range(batch.segments):
            for head in range(index.blocks.kv_heads):
                begin = batch.begin + segment * batch.tokens
                keys = index.blocks.keys(head, begin, begin + batch.tokens)[batch.arrays["members"][segment, head]]
                for cluster in np.split(keys, batch.arrays["first"][segment, head][1:-1]):
                    total += float(np.square(cluster - cluster.mean(0)).sum()) if len(cluster) else 0.0
    return total


def test_what_all_keys_have_in_common_does_not_blur_clusters(device):
    accelerator, how = DeviceAccelerator(device, TILE), KMeans.of(500, 16, 4, 0.5)
    keys = np.round(8 * keys_of(500)) / 8  # exact with the offset too
    (alone,), (moved,) = accelerator.clusters([keys], how), accelerator.clusters([keys + np.float32(4096)], how)
    assert (alone == moved).mean() > 0.99


def test_clusters_of_equal_keys_are_one_cluster(device):
    (found,) = DeviceAccelerator(device, TILE).clusters([np.ones((64, 16), np.float32)], KMeans.of(32, 4, 3, 0.5))
    assert found.shape == (2, 32)
    assert found.dtype == np.uint16
    assert all(len(np.unique(segment)) == 1 for segment in found)


def test_one_head_is_read_ahead_and_no_more(device):
    events = []

    def heads():
        for head in range(4):
            events.append(f"read {head}")
            yield keys_of(100, seed=head)

    for head, found in enumerate(DeviceAccelerator(device, TILE).nearest_before(heads(), 4)):
        events.append(f"got {head}")
        check_scores(found, np.hstack([distances_before(keys_of(100, seed=head)), np.full((100, 4), -np.inf)]), 4)
    assert events == ["read 0", "read 1", "got 0", "read 2", "got 1", "read 3", "got 2", "got 3"]


class Watched(ImmediateStream):
    """Notes what is asked of it."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def record_event(self):
        self.notes.append(f"mark {self.name}")
        return self

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event.name}")

    def synchronize(self):
        self.notes.append(f"wait for {self.name}")


def test_nothing_is_computed_before_it_is_copied_and_no_buffer_is_used_before_it_is_read(monkeypatch):
    notes = []
    accelerator = DeviceAccelerator(open_device("interpreter"), TILE)
    accelerator._copying, accelerator._working = Watched("copies", notes), Watched("work", notes)
    monkeypatch.setattr(
        building_on_device, "nearest_before", lambda keys, *_: notes.append("compute") or keys[:, :2].to(torch.int32)
    )
    list(accelerator.nearest_before([keys_of(10), keys_of(10)], 2))
    # The first mark gives the buffer back to the staging, the second is what the work waits for.
    head = ["mark copies", "mark copies", "work waits for copies", "compute", "mark work"]
    assert notes == [*head, *head, "wait for work", "wait for work"]


def test_a_build_that_is_given_up_gives_its_buffers_back(device):
    steps = DeviceAccelerator(device, TILE).nearest_before((keys_of(100, seed=i) for i in range(9)), 4)
    next(steps)
    steps.close()
    device.staging.close()
    assert device.staging.nbytes == 0


@pytest.mark.parametrize(("error", "lost"), [(TOO_FULL, False), (FAILED, True)])
@pytest.mark.parametrize("kind", [Hnsw, Clusters])
def test_a_build_goes_on_where_the_device_fails_in_the_middle(error, lost, kind, device, monkeypatch, caplog):
    blocks = Layer.of(600).blocks
    accelerator = DeviceAccelerator(device, TILE)
    name = "nearest_before" if kind is Hnsw else "cluster"
    fails_after(monkeypatch, name, 1, error)
    with caplog.at_level(logging.WARNING):
        index = kind.build(blocks, accelerator=accelerator)
        index.verify()
        assert device.lost is lost
        kind.build(blocks, accelerator=accelerator).verify()  # which does not try, and does not say so again
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "on the CPU" in caplog.text
    assert error[1].split(".")[0] in caplog.text
    with pytest.raises(AcceleratorLost):
        next(accelerator.nearest_before([keys_of(10)], 1))
    gc.collect()
    device.staging.close()
    assert device.staging.nbytes == 0


def test_memory_that_is_free_again_is_used_again(device, monkeypatch):
    accelerator = DeviceAccelerator(device, TILE)
    with monkeypatch.context() as patch:
        fails_after(patch, "nearest_before", 0, TOO_FULL)
        with pytest.raises(AcceleratorLost):
            list(accelerator.nearest_before([keys_of(10)], 1))
    monkeypatch.setattr(building_on_device, "monotonic", lambda: time.monotonic() + building_on_device.REST_SECONDS)
    assert len(list(accelerator.nearest_before([keys_of(10)], 1))) == 1


def test_an_error_that_is_no_failure_of_the_device_is_not_hidden(device, monkeypatch):
    fails_after(monkeypatch, "nearest_before", 0, (RuntimeError, "shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"):
        Hnsw.build(Layer.of(50).blocks, accelerator=DeviceAccelerator(device, TILE))


def fails_after(patch, name, calls, error):
    """Let the function of that name in kvdb.gpu.index_build.accelerator raise, from its call with this number on."""
    right, seen = getattr(building_on_device, name), []

    def wrong(*args):
        seen.append(name)
        if len(seen) > calls:
            kind, message = error
            raise kind(message)
        return right(*args)

    patch.setattr(building_on_device, name, wrong)


@dataclass
class Resources:
    """The fake faiss's StandardGpuResources."""

    nbytes: int = 0

    def setTempMemory(self, nbytes):  # noqa: N802, faiss's name
        self.nbytes = nbytes


def fake_faiss(monkeypatch, *, gpus=1, seconds=0.0, wrong=None):
    """A faiss in sys.modules, whose searches take that much longer than ours by a clock of their own, a little less for 0.
    Returns the shapes that it was asked for."""
    asked, clock = [], [0.0]

    def perf_counter():
        clock[0] += 0.1
        return clock[0]

    def knn_gpu(resources, queries, keys, k, metric):
        assert isinstance(resources, Resources)
        assert resources.nbytes
        assert metric == "inner product"
        if wrong is not None:
            raise wrong
        asked.append((tuple(queries.shape), tuple(keys.shape), k))
        clock[0] += seconds or -0.05
        if seconds == 0.0 and len(queries) == knn_choice.QUERIES:  # only its time counts
            return torch.empty(0), torch.empty(0)
        return tuple((queries @ keys.T).topk(k, dim=1))

    faiss, contrib = ModuleType("faiss"), ModuleType("faiss.contrib")
    faiss.contrib, faiss.METRIC_INNER_PRODUCT = contrib, "inner product"
    faiss.knn_gpu, faiss.StandardGpuResources, faiss.get_num_gpus = knn_gpu, Resources, lambda: gpus
    for name, module in {"": faiss, ".contrib": contrib, ".contrib.torch_utils": ModuleType("torch_utils")}.items():
        monkeypatch.setitem(sys.modules, "faiss" + name, module)
    monkeypatch.setattr(knn_choice, "perf_counter", perf_counter)
    monkeypatch.setattr(knn_choice, "_chosen", {})
    monkeypatch.setattr(knn_choice, "KEYS", 2048)
    monkeypatch.setattr(knn_choice, "QUERIES", 256)
    return asked


def test_faiss_is_used_where_it_is_faster(monkeypatch):
    asked = fake_faiss(monkeypatch)
    found = knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24)
    assert asked == [((256, 24), (2048, 24), 64)] * (knn_choice.ROUNDS + 1)
    assert knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24) is found  # measured once
    assert len(asked) == knn_choice.ROUNDS + 1
    keys = torch.from_numpy(keys_of(700))
    nearest = knn.nearest_before(keys, 30, TILE, found).numpy()
    assert len(asked) > knn_choice.ROUNDS + 2
    check_scores(nearest, np.hstack([distances_before(keys.numpy()), np.full((700, 30), -np.inf)]), 30)
    count = len(asked)
    found(keys[:2], keys, 600)
    assert len(asked) == count + 1
    many = torch.from_numpy(keys_of(1200))
    assert found(many[:2], many, 1100)[0].shape == (2, 1100)  # more than faiss selects
    assert len(asked) == count + 1


def test_faiss_is_not_used_where_it_is_slower_or_cannot(monkeypatch):
    fake_faiss(monkeypatch, seconds=0.5)
    assert knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24) is knn.knn_search
    for options in ({"wrong": TypeError("bfloat16")}, {"gpus": 0}):
        asked = fake_faiss(monkeypatch, **options)
        assert knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24) is knn.knn_search
        assert not asked
    fake_faiss(monkeypatch)
    monkeypatch.delattr(sys.modules["faiss"], "StandardGpuResources")  # faiss-cpu
    assert knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24) is knn.knn_search
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(knn_choice, "_chosen", {})
    assert knn_choice.fastest_knn_search(torch.device("cpu"), torch.float32, 24) is knn.knn_search


def test_without_a_device_nothing_takes_part(device):
    assert open_accelerator(None) is None
    assert isinstance(open_accelerator(device), DeviceAccelerator)

    def watch():
        raise CapacityError("no memory left")

    assert open_accelerator(SimpleNamespace(memory_total=1, watch=watch)) is None


def test_a_database_builds_on_its_device(monkeypatch, make_kv, spec):
    accelerator = Plain()
    monkeypatch.setattr(kvdb.database.components, "open_accelerator", lambda device: accelerator)
    engine = Database(Config(storage=StorageConfig(arena_bytes=1 << 20), indexes=IndexConfig(segment_tokens_min=64)))
    with Client(engine) as db:
        kv = make_kv(spec, 200)
        db.import_context(spec, kv.tokens, kv.pairs(), name="document")
        for kind in ("hnsw", "coarse-clusters", "flat"):
            db.build_index("document", kind)
        assert accelerator.calls == ["nearest_before"] * 4 + ["clusters"] * 4  # of two layers with two KV heads
        assert engine.verify("document").indexes == 6


@pytest.mark.parametrize("kind", ["hnsw", "coarse-clusters"])
def test_an_engine_with_a_gpu_builds_there(kind, make_engine, make_kv, spec, monkeypatch):
    names = {"hnsw": "nearest_before", "coarse-clusters": "cluster"}
    computed, right = [], getattr(building_on_device, names[kind])
    monkeypatch.setattr(building_on_device, names[kind], lambda *args: computed.append(kind) or right(*args))
    engine = make_engine()
    db, kv = Client(engine), make_kv(spec, 300)
    db.import_context(spec, kv.tokens, kv.pairs(), name="document")
    db.build_index("document", kind)
    assert len(computed) == spec.layers * spec.kv_heads
    assert engine.verify("document").indexes == spec.layers
