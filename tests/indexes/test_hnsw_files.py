"""What changes a graph index and what keeps it: added tokens, files, verification, bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as native
import indexes.file as index_file
from indexes.base import IndexCorrupt, Queries
from indexes.blocks import DTYPES, Blocks
from indexes.hnsw import Hnsw, Settings
from indexes.hnsw.build import NO_LINK
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.hnsw_data import TOKENS, ask, check_form, every_score, found_of, index, layer, recall, wanted

RETRIEVALS = [Exact(), Dipr(), TopK(20), TopP(0.9)]


def first(blocks, tokens):
    return Blocks(blocks.dtype, blocks.kv_heads, blocks.head_dim, blocks.block_size, blocks.table, tokens, blocks.owner)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_tokens_are_found(dtype):
    blocks, q, query_samples = layer(dtype=dtype)
    graph = Hnsw.build(first(blocks, 4800), query_samples)
    for tokens in (4801, 5100, 5100, TOKENS):
        graph.insert(first(blocks, tokens))
        graph.verify()
        queries = ask(q, tokens, window=False)
        scores = every_score(first(blocks, tokens), queries)
        found = graph.search(queries, Dipr())
        check_form(found, scores)
        assert recall(found, wanted(scores, queries, Dipr())) >= 0.97


@pytest.mark.parametrize("start", [0, 1, 70])
def test_an_index_grows_from_nothing(start):
    blocks, q, _ = layer()
    graph = Hnsw.build(first(blocks, start))
    for tokens in (start + 1, 200, 1500):
        graph.insert(first(blocks, tokens))
    graph.verify()
    queries = ask(q, 1500, window=False)
    found = graph.search(queries, Dipr())
    assert recall(found, wanted(every_score(first(blocks, 1500), queries), queries, Dipr())) == 1


def test_inserted_links_lead_to_the_nearest():
    """Without hnswlib's graph: all links are those of `insert`, and the walk must find its way over them."""
    more, q, query_samples = layer(tokens=12_000)
    blocks = first(more, 9000)
    graph = Hnsw.build(first(blocks, 0))
    graph.insert(blocks)
    graph.learn(query_samples)
    queries = ask(q, 9000)
    found = graph.search(queries, Dipr(), give_up=True)
    assert not found.dense.any()
    assert recall(found, wanted(every_score(blocks, queries), queries, Dipr())) >= 0.97


def test_other_blocks_cannot_be_added():
    blocks, _, _ = layer()
    graph = Hnsw.build(first(blocks, 100))
    for wrong in (first(blocks, 99), layer(dtype="float32")[0]):
        with pytest.raises(ValueError, match="the new blocks h"):
            graph.insert(wrong)


def test_a_file_gives_the_same_index(tmp_path):
    blocks, q, _ = layer()
    index().save(tmp_path / "graph")
    loaded = Hnsw.load(tmp_path / "graph", blocks)
    loaded.verify()
    assert loaded.settings == index().settings
    assert loaded.nbytes == index().nbytes
    for retrieval in RETRIEVALS:
        one, other = (each.search(ask(q), retrieval) for each in (index(), loaded))
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.missed, other.missed)


def test_a_file_of_other_keys_or_cut_short_is_refused(tmp_path):
    blocks, _, _ = layer()
    index().save(tmp_path / "graph")
    for other in (layer("diffuse")[0], layer(dtype="float32")[0], first(blocks, TOKENS - 1)):
        with pytest.raises(IndexCorrupt):
            Hnsw.load(tmp_path / "graph", other)
    content = (tmp_path / "graph").read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(IndexCorrupt):
            Hnsw.load(tmp_path / "cut", blocks)


@pytest.mark.parametrize("name", ["codes", "residual", "links", "low", "step", "starts"])
def test_a_file_that_contradicts_itself_is_refused(name, tmp_path):
    blocks, _, _ = layer()
    index().save(tmp_path / "graph")
    header, arrays = index_file.read(tmp_path / "graph", "hnsw")
    if name == "links":
        arrays[name][1, 5, 0] = TOKENS
    elif name == "starts":
        arrays[name][0, 0] = TOKENS
    else:
        arrays[name] = arrays[name][:, :-1]
    index_file.write(tmp_path / "wrong", "hnsw", header, arrays)
    with pytest.raises(IndexCorrupt):
        Hnsw.load(tmp_path / "wrong", blocks)
    del header["measured"]
    index_file.write(tmp_path / "wrong", "hnsw", header, arrays)
    with pytest.raises(IndexCorrupt):
        Hnsw.load(tmp_path / "wrong", blocks)


@pytest.mark.parametrize("damage", ["codes", "residual", "links", "unreachable"])
def test_verify_sees_damage(damage):
    blocks, _, _ = layer()
    graph = Hnsw.build(first(blocks, 2000))
    graph.verify()
    if damage == "codes":
        graph.codes.codes[1, 777, :8] ^= 255
    elif damage == "residual":
        graph.codes.residual[0, 3] *= 2
    elif damage == "links":
        graph.codes.links[0, 9, 0] = 2000
    else:
        graph.codes.links[:] = 0xFFFFFFFF
    with pytest.raises(IndexCorrupt):
        graph.verify()


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(0, 100), st.floats(0, 1))
def test_repair_reaches_all_and_adding_cuts_nobody_off(seed, tokens, more, full):
    """From any links, those of islands and of lists that are full included; other links only where a list is full."""
    rng = np.random.default_rng(seed)
    blocks = Blocks.of(rng.standard_normal((2, tokens + more, 8)).astype(np.float32))
    graph = Hnsw.build(first(blocks, 0), None, Settings(links=2, spare=0))
    graph.insert(first(blocks, tokens))
    near = np.arange(tokens)[:, None] // 7 * 7 + rng.integers(0, 7, (2, tokens, 4))  # islands of seven
    lists = np.where(rng.random(near.shape) < full, np.minimum(near, tokens - 1), NO_LINK).astype(np.uint32)
    lists = np.sort(lists, axis=-1)
    graph.codes.links[:, :tokens] = lists
    graph.codes.parents = graph.codes.no_parents()
    lost = native.graph_repair(graph.codes.native, graph.codes.parents)
    assert lost >= 2 * (tokens - 7) or tokens < 7
    parents = graph.codes.parents[:, :tokens]
    assert (graph.codes.links[np.arange(2)[:, None], parents] == np.arange(tokens)[None, :, None]).any(-1)[:, 1:].all()
    graph.verify()
    again = graph.codes.links.copy()
    assert native.graph_repair(graph.codes.native, graph.codes.parents) == 0
    np.testing.assert_array_equal(graph.codes.links, again)
    graph.insert(blocks)
    graph.verify()


def test_a_loaded_index_takes_in_more(tmp_path):
    blocks, q, query_samples = layer()
    Hnsw.build(first(blocks, 5000), query_samples).save(tmp_path / "graph")
    graph = Hnsw.load(tmp_path / "graph", first(blocks, 5000))
    graph.verify()
    graph.insert(blocks)
    graph.verify()
    queries = ask(q)
    assert recall(graph.search(queries, Dipr()), wanted(every_score(blocks, queries), queries, Dipr())) >= 0.97


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([8, 24, 72, 128, 256]))
def test_no_content_of_the_arrays_leads_a_search_astray(seed, tokens, head_dim):
    rng = np.random.default_rng(seed)
    blocks = Blocks.of(rng.standard_normal((2, 6000, head_dim)).astype(np.float32))
    graph = Hnsw.build(first(blocks, 0), None, Settings(random=8, starts=4))
    graph.insert(first(blocks, tokens))
    graph.codes.links[:] = rng.integers(0, 2**32, graph.codes.links.shape, dtype=np.uint32)
    graph.codes.links[rng.random(graph.codes.links.shape) < 0.7] = rng.integers(tokens)
    graph.codes.codes[:] = rng.integers(0, 256, graph.codes.codes.shape, dtype=np.uint8)
    queries = ask(rng.standard_normal((4, 2, head_dim)), tokens, window=False)
    for retrieval in RETRIEVALS:
        check_form(graph.search(queries, retrieval, tight=True), every_score(first(blocks, tokens), queries))


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_one_token(tokens, tmp_path):
    blocks, q, query_samples = layer()
    graph = Hnsw.build(first(blocks, tokens), query_samples)
    graph.verify()
    graph.save(tmp_path / "graph")
    for each in (graph, Hnsw.load(tmp_path / "graph", first(blocks, tokens))):
        for retrieval in RETRIEVALS:
            found = each.search(ask(q, tokens, window=False), retrieval, tight=True)
            assert len(found.ids) == 4 * 6 * tokens
            assert (found.missed == -np.inf).all()


def test_equal_keys_are_all_found():
    blocks = Blocks.of(np.ones((2, 5000, 16), np.float32))
    graph = Hnsw.build(blocks)
    queries = ask(np.ones((4, 1, 16)), 5000, window=False)
    assert len(graph.search(queries, Dipr()).ids) == 4 * 5000
    assert len(graph.search(queries, TopK(7)).ids) == 4 * 7


def test_zero_queries_want_everything_and_others_that_are_no_numbers_are_refused():
    _, q, _ = layer()
    zero = index().search(ask(np.zeros_like(q)), Dipr())
    assert (np.diff(zero.offsets) == TOKENS - 80).all()
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            index().search(ask(np.full_like(q, value)), Dipr())
        with pytest.raises(ValueError, match="NaN or infinity"):
            index().learn(np.full_like(q, value))


def test_wrong_shapes_are_refused():
    _, q, query_samples = layer()
    for wrong in (ask(q[..., :32]), Queries.of(q, 1, 1.0, TOKENS), ask(q, TOKENS + 1, window=False)):
        for retrieval in RETRIEVALS:
            with pytest.raises(ValueError, match="expected"):
                index().search(wrong, retrieval)
    for wrong in (query_samples[..., :32], query_samples[:3], query_samples[:, :0], query_samples[0]):
        with pytest.raises(ValueError, match="samples have shape"):
            Hnsw.build(layer()[0], wrong)


def test_far_keys_do_not_cost_the_others_their_precision():
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((1, 8000, 32)).astype(np.float32)
    keys[0, :3] *= 300
    blocks = Blocks.of(keys)
    graph = Hnsw.build(blocks)
    assert set(range(3)) <= set(graph.codes.outliers[0].tolist())
    q = rng.standard_normal((2, 4, 32)).astype(np.float32)
    queries = Queries.of(q, 1, 0.2, 8000)
    scores = every_score(blocks, queries)
    found = graph.search(queries, Dipr(), tight=True)
    check_form(found, scores)
    sets = list(wanted(scores, queries, Dipr()))
    assert recall(found, sets) >= 0.95
    far = set(range(3))
    assert any(want & far for want in sets)
    assert all(want & far <= set(found_of(found, row)[0].tolist()) for row, want in enumerate(sets))


def test_the_links_of_a_token_lie_behind_its_code(tmp_path):
    index().save(tmp_path / "graph")
    for codes in (index().codes, Hnsw.load(tmp_path / "graph", layer()[0]).codes):
        assert codes.codes.strides[:2] == codes.links.strides[:2]
        assert codes.links.ctypes.data - codes.codes.ctypes.data == codes.codes.shape[2]


def test_what_python_hands_over_is_checked():
    graph, blocks = index().codes, layer()[0]
    for wrong in (graph.codes[:, ::2], graph.codes[:, ::-1], graph.codes[:, 1:]):
        with pytest.raises(ValueError, match="equal distances|other shapes|expected"):
            native.Graph(wrong, graph.residual, graph.links, graph.low, graph.step, TOKENS)
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="capacity|shape|expected"):
        native.Graph(graph.codes, graph.residual[:, 1:], graph.links, graph.low, graph.step, TOKENS)
    with pytest.raises(ValueError, match="step"):
        native.Graph(graph.codes, graph.residual, graph.links, graph.low, 0 * graph.step, TOKENS)
    with pytest.raises(ValueError, match="kv_head"):
        native.graph_encode(graph.native, blocks.native, 2, 0)
    with pytest.raises(ValueError, match="pivots"):
        native.graph_connect(
            graph.native, blocks.native, 0, np.full(1, TOKENS, np.int32), np.zeros(2, np.int64), one[:0].astype("i4")
        )
    with pytest.raises(ValueError, match="begin"):
        native.graph_insert(graph.native, blocks.native, -1, 64, graph.no_parents())
    with pytest.raises(ValueError, match="kv_head"):
        native.graph_verify(graph.native, -1)
    for wrong in (np.zeros((2, 5), np.uint32), np.zeros((1, TOKENS), np.uint32)):
        with pytest.raises(ValueError, match="parents"):
            native.graph_repair(graph.native, wrong)
        with pytest.raises(ValueError, match="parents"):
            native.graph_insert(graph.native, blocks.native, TOKENS, 64, wrong)
