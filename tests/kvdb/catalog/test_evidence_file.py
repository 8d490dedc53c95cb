"""Evidence comes back to the bit or not at all: what was cut short, changed, or is somebody else's proves nothing."""

import json
import logging
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb.catalog.evidence_file as evidence_file
from kvdb.catalog.evidence_file import Owner, WaySamples
from kvdb.errors import IntegrityError, SpecMismatch, Unavailable, Unsupported

OWNER = Owner(key="7.segments/0.segment", spec="ab" * 32, layers=3, kv_heads=2)
WAYS = [
    {"kind": "flat", "retrieval": {"kind": "dipr", "alpha": 0.012}, "estimate_tail": False},
    {"kind": "coarse-clusters", "retrieval": {"kind": "top_k", "k": 64}, "estimate_tail": True},
]


def samples_of(rng, kv_heads=2):
    made = []
    for layer, n in ((0, 1), (2, 9), (2, 0)):
        errors = rng.exponential(0.01, (n, kv_heads)).astype(np.float32)
        errors[rng.random(errors.shape) < 0.2] = np.nan
        missed = rng.normal(-6, 2, (n, kv_heads)).astype(np.float32)
        missed[rng.random(missed.shape) < 0.1] = -np.inf
        made.append(WaySamples(layer, WAYS[n % 2], errors, missed))
    return made


def same(loaded, saved):
    return len(loaded) == len(saved) and all(
        (a.layer, dict(a.way)) == (b.layer, dict(b.way))
        and a.errors.dtype == a.missed.dtype == np.float32
        and a.errors.tobytes() == b.errors.tobytes()
        and a.missed.tobytes() == b.missed.tobytes()
        for a, b in zip(loaded, saved, strict=True)
    )


@pytest.fixture
def saved(tmp_path, rng):
    samples = samples_of(rng)
    evidence_file.save(tmp_path / "0.evidence", OWNER, samples)
    return tmp_path / "0.evidence", samples


def resealed(content, change):
    """The file's bytes with its JSON changed, its length and checksum those of the new content."""
    _, _, text_nbytes = evidence_file.START.unpack_from(content)
    begin = evidence_file.START.size
    fields = json.loads(content[begin : begin + text_nbytes])
    change(fields)
    text = json.dumps(fields).encode()
    payload = content[begin + text_nbytes : -4]
    whole = evidence_file.START.pack(evidence_file.MAGIC, begin + len(text) + len(payload) + 4, len(text)) + text + payload
    return whole + evidence_file.SUM.pack(evidence_file._checksum(whole))


def test_evidence_comes_back_to_the_bit(saved):
    path, samples = saved
    assert same(evidence_file.load(path, OWNER), samples)
    assert same(evidence_file.load_or_none(path, OWNER), samples)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_no_samples_are_a_file_too(tmp_path):
    for samples in ([], [WaySamples(0, WAYS[0], *np.zeros((2, 0, 2), np.float32))]):
        evidence_file.save(tmp_path / "0.evidence", OWNER, samples)
        assert same(evidence_file.load(tmp_path / "0.evidence", OWNER), samples)


def test_a_file_that_is_cut_short_at_any_byte_is_refused(saved):
    path, _ = saved
    content = path.read_bytes()
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        with pytest.raises(IntegrityError):
            evidence_file.load(path, OWNER)
    path.write_bytes(content + b"\0")
    with pytest.raises(IntegrityError):
        evidence_file.load(path, OWNER)


def test_any_flipped_bit_is_found(saved):
    path, _ = saved
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, 8 * len(content), 7):  # every byte, each time another bit of it
            at = bit // 8
            os.pwrite(file.fileno(), bytes([content[at] ^ 1 << bit % 8]), at)
            with pytest.raises(IntegrityError):
                evidence_file.load(path, OWNER)
            os.pwrite(file.fileno(), content[at : at + 1], at)


@given(st.data())
def test_random_damage_is_found(saved, data):
    path, samples = saved
    original = path.read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        assert same(evidence_file.load(path, OWNER), samples)
        assert bytes(content) == original
    except IntegrityError:
        assert bytes(content) != original
    finally:
        path.write_bytes(original)


def test_another_version_is_named(saved):
    path, _ = saved
    path.write_bytes(resealed(path.read_bytes(), lambda fields: fields.update(version=2, samples="of another form")))
    with pytest.raises(Unsupported, match="version 2; expected 1"):
        evidence_file.load(path, OWNER)


def test_another_spec_is_named_and_so_is_another_segment(saved):
    path, _ = saved
    with pytest.raises(SpecMismatch, match="cdcd"):
        evidence_file.load(path, replace(OWNER, spec="cd" * 32))
    for other in (replace(OWNER, key="1"), replace(OWNER, layers=4), replace(OWNER, kv_heads=4)):
        with pytest.raises(IntegrityError, match="another segment"):
            evidence_file.load(path, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 3},
        {"layer": -1},
        {"layer": 1.0},
        {"layer": None},
        {"n": 10},
        {"n": 8},
        {"n": -1},
        {"n": True},
        {"n": 2**62},
        {"way": "flat"},
    ],
)
def test_a_sealed_file_that_says_what_was_never_saved_is_refused(saved, changes):
    path, _ = saved
    path.write_bytes(resealed(path.read_bytes(), lambda fields: fields["samples"][1].update(changes)))
    with pytest.raises(IntegrityError, match="cannot be read"):
        evidence_file.load(path, OWNER)


@pytest.mark.parametrize("wrong", ["owner", "samples", "version"])
def test_a_sealed_file_that_lacks_something_is_refused(saved, wrong):
    path, _ = saved
    path.write_bytes(resealed(path.read_bytes(), lambda fields: fields.pop(wrong)))
    with pytest.raises(IntegrityError, match="cannot be read"):
        evidence_file.load(path, OWNER)


@pytest.mark.parametrize(("name", "value"), [("errors", -0.01), ("missed", math.nan)])
def test_numbers_that_no_audit_gives_are_refused(saved, name, value):
    path, samples = saved
    getattr(samples[1], name)[3, 1] = value
    evidence_file.save(path, OWNER, samples)
    with pytest.raises(IntegrityError, match="cannot be read"):
        evidence_file.load(path, OWNER)


def test_what_is_not_trusted_is_one_line_in_the_log(saved, caplog):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert evidence_file.load_or_none(path, OWNER) is None
        assert evidence_file.load_or_none(path.with_name("none.evidence"), OWNER) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_what_cannot_be_read_or_written_is_unavailable(saved, tmp_path):
    _, samples = saved
    with pytest.raises(Unavailable, match="cannot be read"):
        evidence_file.load(tmp_path, OWNER)
    assert evidence_file.load_or_none(tmp_path, OWNER) is None
    with pytest.raises(Unavailable, match="cannot be written"):
        evidence_file.save(tmp_path / "no folder" / "0.evidence", OWNER, samples)


def test_a_second_save_replaces_the_first_and_a_failed_one_does_not(saved, rng, monkeypatch):
    path, samples = saved
    more = samples_of(rng)
    evidence_file.save(path, OWNER, more)
    assert same(evidence_file.load(path, OWNER), more)
    monkeypatch.setattr(evidence_file.os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Unavailable, match="No space left"):
        evidence_file.save(path, OWNER, samples)
    assert same(evidence_file.load(path, OWNER), more)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
