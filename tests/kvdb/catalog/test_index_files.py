"""Indexes outlive the database beside their segments' files, and are never used over other keys or when they were changed."""

import logging
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import indexes.registry as registry
from indexes.retrieval import TopK
from kvdb.config import StorageConfig
from kvdb.errors import CapacityError
from kvdb.storage.beside import INDEX
from query_optimizer.query_options import QueryOptions
from tests.database import BLOCK, database, small_config

KINDS = ("flat", "coarse-bounds", "coarse-clusters", "quantized", "hnsw")
ASKED = QueryOptions(TopK(10))
TOKENS = 300


@pytest.fixture
def settings(tmp_path):
    """Of a store whose segments have indexes."""
    small = small_config()
    indexes = replace(small.indexes, automatic=False)
    return replace(small, indexes=indexes, storage=StorageConfig(block_size=BLOCK, arena_bytes=1 << 20, path=str(tmp_path)))


@pytest.fixture
def no_builds(monkeypatch):
    """Whoever builds an index fails."""

    def build(kind, *_):
        raise AssertionError(f"{kind} is built")
        yield

    monkeypatch.setattr(registry, "build_steps", build)


def load(engine, kv, name="doc"):
    writing = engine.begin_import(kv.spec, kv.tokens, name)
    for layer, (k, v) in enumerate(kv.pairs()):
        writing.write(layer, k, v)
    writing.commit()


def answers(engine, kv):
    """What a session over the document answers once its indexes are there."""
    with closing(engine.create_session(kv.spec, kv.tokens)) as session:
        assert engine.wait_for_builds(20)
        return [session.attention(layer, kv.q[layer, :, -1:], ASKED) for layer in range(kv.spec.layers)]


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("segments/*.index"))


@pytest.mark.needs_folder
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_builds_nothing_anew(kind, settings, spec, make_kv, tmp_path, request):
    if registry.missing_library(kind):
        pytest.skip(f"{kind} needs a library that is not installed")
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        built = engine.build_index("doc", kind)
        before = answers(engine, kv)
    assert files(tmp_path) == [f"0.{kind}.{layer}.index" for layer in range(spec.layers)]
    request.getfixturevalue("no_builds")
    with database(config=settings) as engine:
        assert [info.state for info in engine.indexes("doc")] == ["stored"]
        assert engine.indexes("doc")[0].layers == 0, "nothing is loaded before a session needs it"
        after = answers(engine, kv)
        (info,) = engine.indexes("doc")
        assert (info.kind, info.state, info.layers, info.nbytes) == (kind, "ready", spec.layers, built[0].nbytes)
        assert engine.verify("doc").indexes == spec.layers
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_what_was_offloaded_comes_back_with_its_indexes(settings, spec, make_kv, request):
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        engine.build_index("doc", "flat")
        before = answers(engine, kv)
        request.getfixturevalue("no_builds")
        assert engine.offload("doc")
        after = answers(engine, kv)
        assert engine.indexes("doc")[0].layers == spec.layers
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def change_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_another_layer(path):
    shutil.copy(path.with_name("0.flat.0.index"), path)


def of_another_kind(path):
    shutil.copy(path.with_name("0.coarse-bounds.1.index"), path)


def gone(path):
    path.unlink()


@pytest.mark.needs_folder
@pytest.mark.parametrize("fault", [change_a_bit, cut_short, of_another_layer, of_another_kind, gone])
def test_a_file_with_a_fault_is_dropped_and_built_anew(fault, settings, spec, make_kv, tmp_path, caplog):
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        engine.build_index("doc", "flat")
        engine.build_index("doc", "coarse-bounds")
        before = answers(engine, kv)
    path = tmp_path / "segments" / "0.flat.1.index"
    fault(path)
    with caplog.at_level(logging.WARNING, "kvdb"), database(config=settings) as engine:
        after = answers(engine, kv)
        assert engine.verify("doc").indexes == 2 * spec.layers
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert ("an index is dropped, and built anew" in caplog.text) == (fault is not gone)
    assert len(files(tmp_path)) == 2 * spec.layers


@pytest.mark.needs_folder
def test_the_budget_of_indexes_holds_when_they_come_back(settings, spec, make_kv, tmp_path):
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        engine.build_index("doc", "flat")
    tight = replace(settings, indexes=replace(settings.indexes, bytes_max=1000))
    with database(config=tight) as engine:
        answers(engine, kv)
        (info,) = engine.indexes("doc")
        assert (info.state, info.layers) == ("stored", 0)
    assert len(files(tmp_path)) == spec.layers


@pytest.mark.needs_folder
def test_indexes_make_room_on_disk_for_segments(settings, spec, make_kv, tmp_path):
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        alone = sum(path.stat().st_size for path in tmp_path.glob("segments/*"))
    roomy = replace(settings, storage=replace(settings.storage, disk_bytes_max=2 * alone, eviction="none"))
    with database(config=roomy) as engine:
        engine.build_index("doc", "flat")
        assert len(files(tmp_path)) == spec.layers
        load(engine, make_kv(spec, TOKENS, seed=1), "other")
        assert len(files(tmp_path)) < spec.layers
        with pytest.raises(CapacityError, match="the disk tier needs"):
            load(engine, make_kv(spec, TOKENS, seed=2), "too much")
        assert engine.build_index("other", "flat")[0].state == "ready", "in memory only"


@pytest.mark.needs_folder
@pytest.mark.parametrize("kind", ["flat", "coarse-bounds", "hnsw", "quantized"])
@pytest.mark.parametrize("more", [0, -1])
def test_they_never_take_more_of_the_disk_than_they_may(settings, spec, make_kv, tmp_path, kind, more):
    """With a byte less than its files need, one of two indexes stays in memory."""
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        engine.build_index("doc", kind)
        size = sum(path.stat().st_size for path in tmp_path.glob("segments/*"))
    for path in tmp_path.glob("segments/*.index"):
        path.unlink()
    limited = replace(settings, storage=replace(settings.storage, disk_bytes_max=size + more, eviction="none"))
    with database(config=limited) as engine:
        assert engine.build_index("doc", kind)[0].state == "ready"
        assert sum(path.stat().st_size for path in tmp_path.glob("segments/*")) <= size + more
        assert len(files(tmp_path)) == spec.layers + more
        engine.check_integrity()


def test_they_go_with_their_segment(settings, spec, make_kv, tmp_path):
    kv = make_kv(spec, TOKENS)
    with database(config=settings) as engine:
        load(engine, kv)
        engine.build_index("doc", "flat")
        engine.drop("doc")
        assert not list(tmp_path.glob("segments/*"))


def test_every_kind_has_a_name_that_a_file_can_have():
    assert all(INDEX.fullmatch(f".{kind}.0.index") for kind in registry.KINDS)
