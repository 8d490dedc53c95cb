"""Evidence comes back to the bit or not at all: what was cut short, changed, or is somebody else's proves nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb.catalog.evidence.evidence_file as evidence_file
from indexes.retrieval import Dipr, TopK
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.evidence import Evidence, EvidenceRecords
from kvdb.catalog.evidence.evidence_file import ARRAYS, Owner, pack, unpack
from kvdb.catalog.evidence.way_record import SAMPLES_MAX, Audit
from kvdb.errors import IntegrityError, SpecMismatch, Unsupported
from query_optimizer.ways import Way

OWNER = Owner(key="7.segments/0.segment", spec="ab" * 32, layers=3, kv_heads=2)
WAYS = [Way("flat", Dipr(0.012)), Way("coarse-clusters", TopK(64), estimate_tail=True)]


def audit_of(rng):
    errors = rng.exponential(0.01, (2, 1)).astype(np.float32)
    missed = rng.choice([-np.inf, -6.5, -2.0], (2, 1)).astype(np.float32)
    given_up, time_share = rng.random((2, 1)) < 0.2, None if rng.random() < 0.3 else float(rng.random())
    signs = np.where(given_up.repeat(2, axis=0), np.nan, rng.standard_normal((SIGNS, 4, 1))).astype(np.float32)
    whole, chosen = bool(rng.random() < 0.7), bool(rng.random() < 0.1)
    return Audit(errors, missed, signs, rng.random(2) < 0.8, given_up, time_share, whole, chosen)


def audited(rng, audits, evidence=None):
    """Evidence of some audits of two ways in two layers, of which some are of ways in use."""
    evidence = evidence or Evidence()
    for _ in range(audits):
        layer, way = int(rng.choice([0, 2])), WAYS[rng.integers(2)]
        evidence.count_queries(layer, int(rng.integers(1, 60)))
        evidence.add(layer, way, audit_of(rng), np.full(2, 0.03) if rng.random() < 0.5 else None)
    return evidence


def same(left, right):
    return dict(left.queries) == dict(right.queries) and [
        (layer, way, {name: (getattr(one, name).dtype, getattr(one, name).tobytes()) for name in ARRAYS})
        for layer, ways in left.ways.items()
        for way, one in ways.items()
    ] == [
        (layer, way, {name: (getattr(one, name).dtype, getattr(one, name).tobytes()) for name in ARRAYS})
        for layer, ways in right.ways.items()
        for way, one in ways.items()
    ]


@pytest.fixture
def records(rng):
    return audited(rng, 12).take()


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


@pytest.mark.parametrize(("before", "after"), [(0, 9), (1, 0), (40, 60), (400, 100)])
def test_evidence_goes_on_from_a_file_as_if_it_had_stayed(rng, before, after):
    state = rng.bit_generator.state
    stayed = audited(rng, before)
    rng.bit_generator.state = state
    packed = pack(OWNER, audited(rng, before).take())
    restored = Evidence()
    restored.restore(unpack(OWNER, packed))
    state = rng.bit_generator.state
    audited(rng, after, stayed)
    rng.bit_generator.state = state
    audited(rng, after, restored)
    assert same(stayed.take(), restored.take())


def test_what_was_taken_is_gone_and_what_is_restored_is_news(rng):
    evidence = audited(rng, 20)
    version, known = evidence.version, evidence.of(0)
    records = evidence.take()
    assert not evidence.of(0)
    assert evidence.version > version
    version = evidence.version
    evidence.restore(records)
    assert evidence.version > version
    assert all((evidence.of(0)[way].audits == known[way].audits).all() for way in WAYS)


def test_a_file_that_is_cut_short_at_any_byte_is_refused(records):
    content = pack(OWNER, records)
    for wrong in (*(content[:length] for length in range(len(content))), content + b"\0"):
        with pytest.raises(IntegrityError):
            unpack(OWNER, wrong)


def test_any_flipped_bit_is_found(records):
    content = bytearray(pack(OWNER, records))
    for bit in range(0, 8 * len(content), 7):  # every byte, each time another bit of it
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            unpack(OWNER, bytes(content))
        content[bit // 8] ^= 1 << bit % 8


@given(st.data())
def test_random_damage_is_found(records, data):
    original = pack(OWNER, records)
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        assert same(unpack(OWNER, bytes(content)), records)
        assert bytes(content) == original
    except IntegrityError:
        assert bytes(content) != original


def test_another_version_is_named(records):
    content = resealed(pack(OWNER, records), lambda fields: fields.update(version=3, records="of another form"))
    with pytest.raises(Unsupported, match="version 3; expected 2"):
        unpack(OWNER, content)


def test_another_spec_is_named_and_so_is_another_segment(records):
    content = pack(OWNER, records)
    with pytest.raises(SpecMismatch, match="cdcd"):
        unpack(replace(OWNER, spec="cd" * 32), content)
    for other in (replace(OWNER, key="1"), replace(OWNER, layers=4), replace(OWNER, kv_heads=4)):
        with pytest.raises(IntegrityError, match="another segment"):
            unpack(other, content)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 3},
        {"layer": -1},
        {"layer": 1.0},
        {"layer": None},
        {"way": "flat"},
        {"way": {"kind": "flat"}},
        {"way": {"kind": [], "retrieval": {"kind": "top_k", "k": 4}}},
        {"sizes": {"errors": 64, "rows": 3}},
        *({"sizes": {"errors": n, "rows": 3, "times": 2}} for n in (-1, 0, 63, 128, True, 2**62, 1.0)),
    ],
)
def test_a_sealed_file_that_says_what_was_never_packed_is_refused(records, changes):
    content = resealed(pack(OWNER, records), lambda fields: fields["records"][1].update(changes))
    with pytest.raises(IntegrityError, match="cannot be read"):
        unpack(OWNER, content)


@pytest.mark.parametrize("wrong", ["owner", "records", "queries", "version"])
def test_a_sealed_file_that_lacks_something_is_refused(records, wrong):
    content = resealed(pack(OWNER, records), lambda fields: fields.pop(wrong))
    with pytest.raises(IntegrityError, match="cannot be read"):
        unpack(OWNER, content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("errors", -0.01),
        ("rows", -0.01),
        ("missed", math.nan),
        ("times", -1),
        ("given_up", 1.5),
        ("counts", -1),
        ("counts", SAMPLES_MAX),
        ("withdrawn", 0),
        ("stale", 0),
    ],
)
def test_numbers_that_no_audit_leaves_are_refused(rng, name, value):
    records = audited(rng, 50).take()
    getattr(records.ways[0][WAYS[0]], name).flat[0] = value
    with pytest.raises(IntegrityError, match="no audit leaves"):
        unpack(OWNER, pack(OWNER, records))


def test_nothing_known_is_a_file_too():
    assert same(unpack(OWNER, pack(OWNER, EvidenceRecords())), EvidenceRecords())
