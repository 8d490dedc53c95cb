"""Scores are kept with their segment, and under them the best blocks of layers that come from the disk stay in memory."""

import struct
from contextlib import contextmanager
from math import ceil

import numpy as np
import pytest

import kvdb
from kvdb.catalog.segments.scores import unpack
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.selectors.norm import Norm
from tests.kvdb.catalog.offloading import SPEC, answers, change, same

TOKENS, BLOCK, SHARE = 4000, 64, 0.25
BLOCKS = ceil(TOKENS / BLOCK)
LAYER_NBYTES = BLOCKS * BLOCK * SPEC.token_nbytes
NBYTES = 2 * SPEC.layers * SPEC.kv_heads * TOKENS


@contextmanager
def store(folder, cpu_bytes_max=None, **storage):
    """An engine and a client of a durable store; at the end nothing is left of what it took."""
    kept = StorageConfig(arena_bytes=1 << 20, path=str(folder), cpu_bytes_max=cpu_bytes_max, **storage)
    with Database(Config(storage=kept, indexes=IndexConfig(automatic=False, on_demand=""))) as engine:
        yield engine, Client(engine)
        engine.check_integrity()


@pytest.fixture(scope="module")
def kv():
    from tests.conftest import Kv

    return Kv(SPEC, TOKENS, seed=5)


def expected(kv, start=0, stop=TOKENS):
    """The scores of these tokens, as they are kept."""
    return np.stack([Norm().scores(layer, *kv.pairs(start, stop)[layer]) for layer in range(SPEC.layers)]).astype(np.float16)


def segments_of(engine, name="doc"):
    return [view.segment for view in engine._catalog.get(name).views]


def kept(engine, name="doc"):
    """The scores of a context's segments, one behind the other; None where any has none."""
    found = [segment.scores.read(segment.place) for segment in segments_of(engine, name)]
    return None if None in found else np.concatenate([values for _, values in found], axis=-1)


@pytest.mark.parametrize("format_", ["", "int8"])
def test_scores_are_those_of_the_tokens_that_came_and_outlive_the_database(tmp_path, kv, format_):
    with store(tmp_path, selector="norm", format=format_) as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert np.array_equal(kept(engine), expected(kv))
        (path,) = tmp_path.glob("*/*.scores")
        assert NBYTES < path.stat().st_size < NBYTES + 200
        db.verify("doc")
    with store(tmp_path) as (engine, _):
        assert np.array_equal(kept(engine), expected(kv))


def test_nothing_is_scored_unless_it_is_asked_for(tmp_path, kv):
    with store(tmp_path) as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        assert kept(engine) is None
    assert not list(tmp_path.glob("*/*.scores"))


def test_bytes_count_in_memory_until_there_is_a_file_and_then_on_the_disk(tmp_path, kv):
    beside = {}
    for selector in ("", "norm"):
        storage = StorageConfig(arena_bytes=1 << 20, disk_path=str(tmp_path), selector=selector, cpu_bytes_max=64 << 20)
        with Database(Config(storage=storage, indexes=IndexConfig(automatic=False, on_demand=""))) as engine:
            db = Client(engine)
            db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
            before = engine._blocks.budget._beside
            db.offload("doc")
            disk = next(stats.nbytes for stats in engine.tiers() if stats.name == "disk")
            beside[selector] = before, engine._blocks.budget._beside, disk
            db.drop("doc")
            assert engine._blocks.budget._beside < before
            engine.check_integrity()
    (before, after, disk), (before_scored, after_scored, disk_scored) = beside.values()
    assert before_scored - before == NBYTES
    assert after_scored == after
    assert NBYTES < disk_scored - disk < NBYTES + 200


def test_a_session_that_is_stored_and_what_is_laid_out_anew_keep_scores(tmp_path, kv):
    with store(tmp_path, selector="norm") as (engine, db):
        db.import_context(SPEC, kv.tokens[:900], kv.pairs(0, 900), name="900")
        with db.create_session(SPEC, kv.tokens[:900]) as session:
            for at in range(900, 1000, 10):
                for layer, pair in enumerate(kv.pairs(at, at + 10)):
                    session.attend(layer, kv.q[layer][:, at : at + 10], *pair)
                session.store(f"{at + 10}", kv.tokens[: at + 10])
        assert np.array_equal(kept(engine, "1000"), expected(kv)[..., :1000])
        db.drop(*[f"{at}" for at in range(910, 1000, 10)])
        db.compact()
        assert len(segments_of(engine, "1000")) < 4, "those of ten tokens are joined"
        assert np.array_equal(kept(engine, "1000"), expected(kv)[..., :1000])


def test_a_file_with_a_fault_is_dropped(tmp_path, kv):
    with store(tmp_path, selector="norm") as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        contents, (path,) = segments_of(engine)[0].stored.contents, tmp_path.glob("*/*.scores")
    content = path.read_bytes()
    for cut in (0, 3, 40, len(content) - 1):
        with pytest.raises((ValueError, struct.error)):
            unpack(contents, content[:cut])
    change(path, 1000)
    with store(tmp_path) as (engine, _):
        assert kept(engine) is None
        assert not path.exists()


@pytest.fixture(scope="module")
def scored(tmp_path_factory, kv):
    """A store with a scored document, which a test may open but not change."""
    folder = tmp_path_factory.mktemp("scores") / "store"
    with store(folder, selector="norm") as (_, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
    return folder


@pytest.mark.parametrize("share", [0.0, SHARE, 0.5])
def test_the_best_share_of_each_layer_stays_and_answers_are_the_same_bits(scored, kv, share):
    with store(scored) as (_, db):
        right = answers(db.create_session(SPEC, kv.tokens), kv)
    room = int((1 + 3 * share + 0.3) * LAYER_NBYTES)
    with store(scored, room, selector="norm", selector_share=share) as (engine, db):
        session = db.create_session(SPEC, kv.tokens)
        for _ in range(3):
            assert same(answers(session, kv), right)
        paged = segments_of(engine)[0].paged
        best = expected(kv).max(axis=1)
        for number, layer in enumerate(paged.layers):
            blocks = [best[number, at : at + BLOCK].max() for at in range(0, TOKENS, BLOCK)]
            wanted = sorted(range(BLOCKS), key=lambda block: -blocks[block])[: ceil(share * BLOCKS)]
            there = {block for block in range(BLOCKS) if layer.table.layout.read(layer.table.addresses[[block]], 0, 1)[0].any()}
            assert there >= set(wanted)
            assert layer.preferred_nbytes == len(wanted) * layer.table.layout.nbytes
        assert sum(layer.held_nbytes for layer in paged.layers) <= room
        assert min(layer.held_nbytes for layer in paged.layers) < LAYER_NBYTES


def test_the_best_go_where_even_one_layer_needs_their_room(scored, kv):
    with store(scored, 3 * LAYER_NBYTES // 2, selector="norm", selector_share=0.9) as (_, db):
        session = db.create_session(SPEC, kv.tokens)
        first = answers(session, kv)
        assert same(answers(session, kv), first)


def test_searches_under_it_give_the_same_bits(scored, kv):
    found = []
    for storage in ({}, {"selector": "norm", "cpu_bytes_max": 2 * LAYER_NBYTES}):
        with store(scored, **storage) as (_, db):
            db.build_index("doc", "flat")
            session = db.create_session(SPEC, kv.tokens)
            hints = kvdb.Hints(index="flat")
            layers = [*range(SPEC.layers)] * 2
            found.append([session.attention(n, kv.q[n][:, :1], retrieval=kvdb.TopK(40), hints=hints) for n in layers])
    assert same(*found)
