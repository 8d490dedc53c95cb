"""What audits proved goes to disk with its segment and comes back with it, or is proven anew."""

import logging
import re

import numpy as np
import pytest

import kvdb.catalog.evidence.evidence_file as evidence_file
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.way_record import Audit
from query_optimizer.order_statistics import AUDITS_MIN
from tests.database import database, searching_config
from tests.kvdb.session.test_audits import BUDGET, SPEC, WAY, Document, opened


@pytest.fixture
def engine(tmp_path):
    with database(config=searching_config(disk_path=str(tmp_path))) as opened:
        yield opened


@pytest.fixture
def proven(engine):
    """A document of which a search is proven for all heads."""
    document = Document(engine)
    (view,) = engine._catalog.get("doc").views
    small, missed, signs = (
        np.full((2, 1), 1e-3, np.float32),
        np.full((2, 1), -9, np.float32),
        np.full((SIGNS, 4, 1), np.nan, np.float32),
    )
    audit = Audit(small, missed, signs, np.ones(2, np.bool_), np.zeros((2, 1), np.bool_), 0.2)
    for _ in range(AUDITS_MIN):
        view.segment.evidence.add(0, WAY, audit)
    return document


def searches(engine):
    """Whether queries are searched once the segment and its index are back."""
    with opened(engine) as session:
        engine.build_index("doc", "flat")
        return session.explain(0, BUDGET).searches


def the_file(folder):
    (path,) = folder.glob("*/*.evidence")
    return path


@pytest.mark.needs_folder
def test_a_proof_comes_back_from_disk(engine, proven, tmp_path):
    assert searches(engine)
    for _ in range(2):
        assert engine.offload("doc")
        assert the_file(tmp_path).stat().st_size > 0
        engine.check_integrity()
        assert searches(engine)
        assert not list(tmp_path.glob("*/*.evidence"))
    engine.offload("doc")
    engine.drop("doc")
    assert not list(tmp_path.glob("*/*.evidence"))


@pytest.mark.needs_folder
def test_it_is_seen_while_it_is_on_disk(engine, proven, tmp_path):
    (before,) = engine.statistics("doc").segments
    engine.offload("doc")
    (after,) = engine.statistics("doc").segments
    assert after.audits.all()
    assert (after.audits == before.audits).all()
    assert (after.error == before.error).all()
    assert the_file(tmp_path).exists()


@pytest.mark.needs_folder
def test_a_session_that_still_stands_on_it_keeps_it_in_memory(engine, proven, tmp_path):
    with opened(engine) as session:
        assert engine.offload("doc") == 0
        assert session.explain(0, BUDGET).searches
        assert not list(tmp_path.glob("*/*.evidence"))
    assert the_file(tmp_path).exists()


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_another_spec(path):
    content = path.read_bytes()
    spec = SPEC.digest.encode()
    assert content.count(spec) == 1
    body = content[:-4].replace(spec, spec[::-1])
    path.write_bytes(body + evidence_file.SUM.pack(evidence_file._checksum(body)))


@pytest.mark.needs_folder
@pytest.mark.parametrize(
    ("damage", "told"),
    [(cut_short, "of the .* that were written"), (of_another_spec, "is of spec"), (lambda path: path.unlink(), "cannot be read")],
)
def test_what_is_not_what_was_put_away_is_dropped_with_one_line(engine, proven, tmp_path, caplog, damage, told):
    engine.offload("doc")
    damage(the_file(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert not searches(engine)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("evidence is dropped: ")
    assert re.search(told, line)
    assert "\n" not in line
    assert not list(tmp_path.glob("*/*.evidence"))


@pytest.mark.needs_folder
def test_where_it_cannot_be_written_it_stays_in_memory(engine, proven, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with caplog.at_level(logging.WARNING):
        assert engine.offload("doc")
    assert "evidence stays in main memory" in caplog.text
    engine.check_integrity()
    assert engine.statistics("doc").segments[0].audits.all()
    assert searches(engine)


def test_without_evidence_there_is_no_file(engine, tmp_path):
    Document(engine)
    assert engine.offload("doc")
    assert not list(tmp_path.glob("*/*.evidence"))
