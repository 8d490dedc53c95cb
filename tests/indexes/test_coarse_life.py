"""How coarse indexes are built, grow, are kept, are checked, and refuse what is wrong."""

import dataclasses

import numpy as np
import pytest

from indexes.base import IndexCorrupt, Queries
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.coarse_data import Layer, check_rows, logits, rows, same_set, wanted

KINDS = [Bounds, Means, Clusters]
RETRIEVALS = [Exact(), Dipr(0.05), TopK(12), TopP(0.7)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_by_what_is_new(kind):
    layer = Layer.of(1500)
    index = kind.build(layer.cut(0), segment_tokens=512)
    for tokens in (1, 2, 63, 64, 200, 700, 701, 1499, 1500, 1500):
        index.insert(layer.cut(tokens))
        index.verify()
        queries = layer.queries(end=tokens)
        found = index.search(queries, Exact())
        assert len(found.ids) == 8 * tokens
        check_rows(index.blocks, queries, index.search(queries, Dipr(0.1)))


def test_short_segments_do_not_pile_up():
    layer = Layer.of(1024)
    index = Clusters.build(layer.cut(0), segment_tokens=512)
    for tokens in range(16, 1025, 16):
        index.insert(layer.cut(tokens))
        assert len(index._batches) <= 2 + 5
    assert index._batches[-1].tokens == 512


@pytest.mark.parametrize("kind", KINDS)
def test_other_blocks_are_refused(kind):
    layer = Layer.of(300)
    index = kind.build(layer.blocks)
    with pytest.raises(ValueError, match="expected the 300 indexed before"):
        index.insert(layer.cut(299))
    with pytest.raises(ValueError, match="float16"):
        index.insert(Layer.of(400, "float16").blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind, tmp_path):
    layer = Layer.of(1300, "bfloat16")
    index = kind.build(layer.cut(1000), segment_tokens=512)
    index.insert(layer.blocks)
    index.save(tmp_path / "index")
    loaded = kind.load(tmp_path / "index", layer.blocks)
    loaded.verify()
    assert loaded.nbytes == index.nbytes
    for retrieval in RETRIEVALS:
        a, b = (x.search(layer.queries(), retrieval) for x in (index, loaded))
        for field in ("offsets", "ids", "scores", "missed", "missed_bound"):
            assert np.array_equal(getattr(a, field), getattr(b, field))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_of_these_keys_is_refused(kind, tmp_path):
    layer = Layer.of(700)
    path = tmp_path / "index"
    kind.build(layer.blocks).save(path)
    for other in (Layer.of(700, seed=1).blocks, layer.cut(699), Layer.of(700, "float16").blocks):
        with pytest.raises(IndexCorrupt, match="other keys"):
            kind.load(path, other)
    other_kind = KINDS[(KINDS.index(kind) + 1) % 3]
    with pytest.raises(IndexCorrupt):
        other_kind.load(path, layer.blocks)
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:-9] + b"\0" + content[-8:], b""):
        path.write_bytes(damaged)
        if damaged != content:
            with pytest.raises(IndexCorrupt):
                kind.load(path, layer.blocks)


def test_members_beyond_their_segment_are_refused(tmp_path):
    layer = Layer.of(700)
    index = Clusters.build(layer.blocks)
    index._batches[0].arrays["members"][0, 0, 3] = 9999
    index.save(tmp_path / "index")
    with pytest.raises(IndexCorrupt, match="beyond its segment"):
        Clusters.load(tmp_path / "index", layer.blocks)
    with pytest.raises(IndexCorrupt):
        index.verify()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Bounds, "center"),
        (Bounds, "center_scales"),
        (Means, "center"),
        (Means, "farthest"),
        (Means, "radius"),
        (Means, "norm"),
        (Clusters, "first"),
        (Clusters, "members"),
        (Clusters, "values"),
        (Clusters, "shift"),
    ],
)
def test_verify_finds_one_wrong_number(kind, name):
    index = kind.build(Layer.of(700).blocks)
    index.verify()
    array = index._batches[0].arrays[name]
    at = (0, 0, 1) if array.shape[2] > 1 else (0, 0, 0)
    array[at] = array[at] + 1
    with pytest.raises(IndexCorrupt, match="pages of tokens"):
        index.verify()


def test_verify_finds_keys_that_changed():
    layer = Layer.of(700)
    index = Bounds.build(layer.blocks)
    layer.blocks.owner.reshape(-1, 2, 2, 64, 32)[3, 0, 1, 5, 2] = 50.0
    with pytest.raises(IndexCorrupt):
        index.verify()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_nothing_to_see_is_the_empty_state(kind, retrieval):
    layer = Layer.of(200)
    hidden = np.ones(200, bool)
    for index, queries in (
        (kind.build(layer.cut(0)), layer.queries(end=0)),
        (kind.build(layer.blocks), layer.queries(hidden=hidden)),
        (kind.build(layer.blocks), layer.queries(begin=7, end=7)),
    ):
        found = index.search(queries, retrieval, estimate_tail=True)
        assert len(found.ids) == 0
        assert np.isneginf(found.missed).all()
        assert np.isneginf(found.missed_bound).all()
        assert found.tail is None or not found.tail.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retrieval", RETRIEVALS)
@pytest.mark.parametrize("tokens", [1, 130])
def test_equal_keys_and_single_tokens(kind, retrieval, tokens):
    k = np.full((2, tokens, 32), 3.0, np.float32)
    layer = Layer(Blocks.of(k, k), np.ones((4, 2, 32), np.float32))
    found = kind.build(layer.blocks).search(layer.queries(), retrieval, estimate_tail=True)
    x = check_rows(layer.blocks, layer.queries(), found)
    for row, ids in enumerate(rows(found)):
        assert len(ids) == len(wanted(x[row], retrieval, 32**-0.5)) or (kind is not Bounds and len(ids) > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_any_length(kind):
    layer = Layer.of(500)
    index = kind.build(layer.blocks)
    for length in (0.0, 1e-38, 1e-20, 1e4, 1e12):
        queries = Queries.of(layer.q * np.float32(length), 2, 1.0, 500)
        found = index.search(queries, Dipr(0.5), estimate_tail=True)
        assert not np.isnan(found.missed).any()
        assert not np.isnan(found.missed_bound).any()
        x = logits(layer.blocks, queries)
        for row, ids in enumerate(rows(found)):
            assert x[row].argmax() in ids or not same_set(x[row], ids, [x[row].argmax()])
            if length < 1e-19:
                assert len(ids) == 500


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_questions_are_refused(kind):
    layer = Layer.of(200)
    index = kind.build(layer.blocks)
    queries = layer.queries()
    wrong = {
        "NaN": {"q": np.full_like(queries.q, np.nan)},
        "infinity": {"q": np.full_like(queries.q, np.inf)},
        "heads": {"q": queries.q[:2], "floor": queries.floor[:2], "outside": queries.outside[:2], "kv_heads": 1},
        "range": {"end": np.full(2, 201)},
        "scale": {"scale": float("nan")},
        "outside holds": {"outside": np.full((4, 2), np.nan, np.float32)},
        "outside has shape": {"outside": np.zeros((4, 1), np.float32)},
        "hidden has": {"hidden": np.zeros(1, np.uint64)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            index.search(dataclasses.replace(queries, **change), Dipr())


def test_sizes_that_do_not_fit_are_refused():
    blocks = Layer.of(100).blocks
    for options in ({"page_size": 0}, {"page_size": 9000}, {"segment_tokens": 70000}, {"margin": 1.5}, {"far": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            Clusters.build(blocks, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_cost_rises_with_tokens_and_rows(kind):
    index = kind.build(Layer.of(100).blocks)
    for retrieval in RETRIEVALS:
        small, large = index.cost(10_000, 4, retrieval), index.cost(100_000, 4, retrieval)
        assert 0 < small.nbytes < large.nbytes
        assert small.operations < index.cost(10_000, 8, retrieval).operations
    assert index.cost(10_000, 4, Exact()).nbytes >= 10_000 * 2 * 32 * 4
