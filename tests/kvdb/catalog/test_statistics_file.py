"""What queries were like outlives the database, and is dropped where its file was changed."""

import logging
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from indexes.retrieval import Dipr
from kvdb.config import StorageConfig
from query_optimizer.query_options import QueryOptions
from tests.database import BLOCK, database, small_config

pytestmark = pytest.mark.usefixtures("scan_for_flat")


@pytest.fixture
def settings(tmp_path):
    small = small_config(("short_context", "diffuse_head"), automatic=False)
    return replace(small, storage=StorageConfig(block_size=BLOCK, arena_bytes=1 << 20, path=str(tmp_path)))


@pytest.fixture
def observed(settings, spec, make_kv):
    """The statistics of a document that was queried, as they were when its store was closed."""
    kv = make_kv(spec, 700)
    kv.q *= 6
    with database(config=settings) as engine:
        writing = engine.begin_import(spec, kv.tokens, "doc")
        for layer, (k, v) in enumerate(kv.pairs()):
            writing.write(layer, k, v)
        writing.commit()
        engine.build_index("doc", "flat")
        with closing(engine.create_session(spec, kv.tokens)) as session:
            for layer in range(spec.layers):
                for at in range(600, 610):
                    session.attention(layer, kv.q[layer, :, at : at + 1], QueryOptions(Dipr(0.012)))
        (segment,) = engine.statistics("doc").segments
    assert segment.queries.min() > 0
    return segment


MEASURED = ("queries", "retrieved", "dense", "sharpness", "window_hits")


def equal(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in MEASURED)


def test_statistics_are_there_when_the_store_is_opened_again(settings, observed):
    for _ in range(2):
        with database(config=settings) as engine:
            assert equal(engine.statistics("doc").segments[0], observed)
            engine.check_integrity()


def test_they_are_kept_where_nobody_asked_for_them(settings, observed):
    with database(config=settings):
        pass
    with database(config=settings) as engine:
        assert equal(engine.statistics("doc").segments[0], observed)


def change_a_digit(content):
    at = content.index(b'"averages"') + 15
    return content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :]


def of_another_segment(content):
    return content.replace(b'/0.segment"', b'/7.segment"')


def cut_short(content):
    return content[:-30]


def nothing(_):
    return b""


def no_text(_):
    return b"\xff" * 90


@pytest.mark.needs_folder
@pytest.mark.parametrize("change", [change_a_digit, of_another_segment, cut_short, nothing, no_text])
def test_a_changed_file_is_dropped(change, settings, observed, tmp_path, caplog):
    path = tmp_path / "segments" / "0.statistics"
    path.write_bytes(change(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "kvdb"), database(config=settings) as engine:
        assert not engine.statistics("doc").segments[0].queries.any()
        assert not path.exists()
    assert "0.segment are dropped" in caplog.text
