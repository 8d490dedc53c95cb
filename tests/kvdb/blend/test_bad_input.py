"""What is wrong with chunks, parts and overlays is refused with the error that names it, and nothing is changed."""

from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Config, StorageConfig
from tests.kvdb.blend.decoding import decode
from tests.kvdb.blend.oracle import ROPES, Oracle, Text
from tests.reference import relative_error

GAPS = [70, 71]
START = 202
UNMOVED = {
    "no RoPE": None,
    "dynamic": kvdb.Rope(scaling={"rope_type": "dynamic", "factor": 2.0}),
    "longrope": kvdb.Rope(scaling={"rope_type": "longrope", "factor": 2.0}),
    "unknown": kvdb.Rope(scaling={"rope_type": "spiral"}),
    "some layers": kvdb.Rope(scaling={"no_rope_layers": (1, 0)}),
}


@pytest.fixture
def stored(db, texts):
    for name in ("a", "b"):
        texts[name].store(db, name)
    return texts


@pytest.fixture
def laid(db, spec, stored):
    """A session over a chunk, two tokens of which layer 0 has one, and a chunk. Afterwards it is as it was."""
    oracle = Oracle(spec, [(stored["b"], 70), 2, (stored["a"], 130)])
    with db.create_session(spec, parts=["b", [7, 8], "a"]) as session:
        one = Text(spec, 1, seed=8)
        session.overlay(0, GAPS[:1], *one.pairs[0])
        oracle.overlay(0, GAPS[:1], *one.pairs[0])
        before = session.stats()
        yield session
        assert session.stats() == before
        other = Text(spec, 2, seed=9)
        for layer, gaps in ((0, GAPS[1:]), (1, GAPS)):
            k, v = (x[layer][:, : len(gaps)] for x in (other.k, other.v))
            session.overlay(layer, gaps, k, v)
            oracle.overlay(layer, gaps, k, v)
            positions = np.arange(START)
            q = Text(spec, START, seed=10).q[layer]
            assert relative_error(session.attention(layer, q, positions=positions), oracle.attention(layer, q, positions)) <= 1e-5
        decode(session, oracle)


def ones(heads, n, dtype=np.float32):
    return np.ones((heads, n, 16), dtype)


def nan(n):
    k = ones(2, n)
    k[1, n - 1, 3] = np.nan
    return k


FRESH = ones(2, 2), ones(2, 2)
OVERLAYS = {
    "unsorted": (errors.PositionError, "run from 9 to 8; expected ascending", (1, [9, 8], *FRESH)),
    "twice": (errors.PositionError, "each once", (1, [9, 9], *FRESH)),
    "negative": (errors.PositionError, "run from -1 to 3; expected .* from 0 to 201", (1, [-1, 3], *FRESH)),
    "in the tail": (errors.PositionError, "run from 9 to 202", (1, [9, START], *FRESH)),
    "far behind": (errors.PositionError, "before the tail", (1, [9, 1 << 40], *FRESH)),
    "recomputed already": (errors.PositionError, "position 70 of layer 0 was recomputed already", (0, GAPS, *FRESH)),
    "too few": (errors.ShapeError, r"positions have the shape \(1,\); expected \(2,\)", (1, [9], *FRESH)),
    "two dimensions": (errors.ShapeError, r"shape \(1, 2\)", (1, [[8, 9]], *FRESH)),
    "floats": (errors.DtypeError, "float64; expected integers", (1, [8.0, 9.0], *FRESH)),
    "words": (errors.DtypeError, "expected integers", (1, ["8", "9"], *FRESH)),
    "heads": (errors.ShapeError, r"k has the shape \(1, 2, 16\)", (1, [8, 9], ones(1, 2), ones(2, 2))),
    "k and v differ": (errors.ShapeError, "k holds 2 tokens and v 1", (1, [8, 9], ones(2, 2), ones(2, 1))),
    "float64": (errors.DtypeError, "expected float32", (1, [8, 9], ones(2, 2, np.float64), ones(2, 2))),
    "NaN keys": (errors.NonFiniteError, "k of KV head 1, token 1", (1, [8, 9], nan(2), ones(2, 2))),
    "NaN values": (errors.NonFiniteError, "v of KV head 1, token 1", (0, [8, 9], ones(2, 2), nan(2))),
    "no such layer": (errors.LayerError, "layer is 2", (2, [8, 9], *FRESH)),
    "no layer": (errors.LayerError, "layer is None", (None, [8, 9], *FRESH)),
}


@pytest.mark.parametrize("case", OVERLAYS)
def test_a_bad_overlay_changes_nothing(laid, case):
    error, message, arguments = OVERLAYS[case]
    with pytest.raises(error, match=message):
        laid.overlay(*arguments)


@pytest.mark.parametrize("case", [case for case in OVERLAYS if case not in {"recomputed already", "NaN keys", "NaN values"}])
def test_a_bad_deviation_changes_nothing(laid, case):
    error, message, arguments = OVERLAYS[case]
    with pytest.raises(error, match=message):
        laid.deviation(*arguments)


def test_fresh_kv_that_is_not_finite_deviates_without_bound(laid):
    assert np.isinf(laid.deviation(1, [8, 9], nan(2), ones(2, 2))).tolist() == [False, True]


@pytest.mark.parametrize("score", ["", "none", 3, "Weighted"])
def test_a_score_that_does_not_exist(laid, score):
    with pytest.raises(errors.InvalidArgument, match="no score of deviation is named .*; expected one of weighted, relative"):
        laid.deviation(1, [8, 9], *FRESH, score=score)


ASKED = {
    "unsorted": (errors.PositionError, "ascending", (0, ones(4, 2), [9, 8])),
    "in the tail": (errors.PositionError, "before the tail", (0, ones(4, 2), [9, START])),
    "too many": (errors.ShapeError, "positions have the shape", (0, ones(4, 1), [8, 9])),
    "heads": (errors.ShapeError, "q has the shape", (0, ones(2, 2), [8, 9])),
    "bfloat16": (errors.DtypeError, "expected float32", (0, ones(4, 2, kvdb.types.DTYPES["bfloat16"]), [8, 9])),
    "NaN": (errors.NonFiniteError, "q holds NaN", (0, np.full((4, 2, 16), np.nan, np.float32), [8, 9])),
    "a gap is open": (
        errors.PositionError,
        "1 tokens of layer 0 hold nothing yet, the first at position 71",
        (0, ones(4, 1), [71]),
    ),
    "gaps are open": (errors.PositionError, "2 tokens of layer 1 hold nothing yet", (1, ones(4, 1), [201])),
    "no such layer": (errors.LayerError, "layer is -1", (-1, ones(4, 1), [8])),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_bad_question_of_stored_tokens_changes_nothing(laid, case):
    error, message, (layer, q, positions) = ASKED[case]
    with pytest.raises(error, match=message):
        laid.attention(layer, q, positions=positions)


def test_nothing_is_decoded_or_stored_while_a_gap_is_open(db, laid):
    for layer, missing in ((0, "1 tokens of layer 0 .* position 71"), (1, "2 tokens of layer 1 .* position 70")):
        with pytest.raises(errors.PositionError, match=missing):
            laid.attend(layer, ones(4, 1), ones(2, 1), ones(2, 1))
        with pytest.raises(errors.PositionError, match=missing):
            laid.attention(layer, ones(4, 1))
    with pytest.raises(errors.PositionError, match="hand in their KV with overlay first"):
        db.store(laid, name="x")
    assert [context.name for context in db.contexts()] == ["a", "b"]


def test_what_was_laid_out_is_asked_with_positions_alone(db, spec, stored):
    with db.create_session(spec, parts=["b", "a"]) as session:
        session.update(0, ones(2, 2), ones(2, 2))
        with pytest.raises(errors.PositionError, match="which holds 2; .* ask for tokens before the tail with positions="):
            session.attention(0, ones(4, 3))
        assert session.attention(0, ones(4, 2)).shape == (4, 2, 16)


def test_a_closed_session_says_so(db, spec, stored):
    session = db.create_session(spec, parts=["b", [1], "a"])
    session.close()
    for call in (
        lambda: session.overlay(0, [70], ones(2, 1), ones(2, 1)),
        lambda: session.deviation(0, [70], ones(2, 1), ones(2, 1)),
        lambda: session.attention(0, ones(4, 1), positions=[3]),
    ):
        with pytest.raises(errors.SessionClosed, match="open another with create_session"):
            call()
    assert (session.start, session.reused, len(session.layout), len(session.tokens)) == (201, 200, 3, 201)


def test_a_session_on_a_prefix_recomputes_nothing(db, spec, stored):
    with db.create_session(spec, stored["a"].tokens) as session:
        assert session.start == 130
        for call in (
            lambda: session.overlay(0, [70], ones(2, 1), ones(2, 1)),
            lambda: session.deviation(0, [70], ones(2, 1), ones(2, 1)),
            lambda: session.attention(0, ones(4, 1), positions=[3]),
        ):
            with pytest.raises(errors.InvalidArgument, match="stands on a prefix, .* open it with parts="):
                call()


PARTS = {
    "overlaps": (
        errors.PositionError,
        "part 1 begins at 70, and at=69 overlaps .*; expected at=70",
        ["b", kvdb.PromptPart("a", at=69)],
    ),
    "a hole": (errors.PositionError, "at=71 leaves positions empty", ["b", kvdb.PromptPart("a", at=71)]),
    "negative": (errors.PositionError, "part 0 begins at 0", [kvdb.PromptPart("a", at=-1)]),
    "at a word": (errors.InvalidArgument, "at='0'", [kvdb.PromptPart("a", at="0")]),
    "none visible": (
        errors.InvalidArgument,
        "part 1 shows visible=0 tokens; expected 1 to 130",
        ["b", kvdb.PromptPart("a", visible=0)],
    ),
    "more visible": (errors.InvalidArgument, "visible=131 tokens; expected 1 to 130", [kvdb.PromptPart("a", visible=131)]),
    "visible truth": (errors.InvalidArgument, "visible=True", [kvdb.PromptPart("a", visible=True)]),
    "visible share": (errors.InvalidArgument, "visible=0.5", [kvdb.PromptPart("a", visible=0.5)]),
    "more tokens visible": (errors.InvalidArgument, "visible=3 tokens; expected 1 to 2", [kvdb.PromptPart([1, 2], visible=3)]),
    "no such chunk": (errors.NotFound, "no context is named 'c'", ["b", "c"]),
    "nothing": (errors.KvdbError, "tokens have", [None]),
    "no ids": (errors.DtypeError, "tokens have the dtype float64", [[0.5]]),
    "two dimensions": (errors.ShapeError, r"tokens have the shape \(1, 1\)", [[[1]]]),
    "a blended context in the middle": (
        errors.InvalidArgument,
        "part 1, context 'blended', was computed behind other",
        ["b", "blended"],
    ),
    "part of a blended context": (
        errors.InvalidArgument,
        "part 0 shows 9 of the 200 tokens",
        [kvdb.PromptPart("blended", visible=9), "b"],
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_cannot_stand_there_are_refused(db, spec, stored, case):
    """And nothing is held of those before them: the fixture proves that every block comes back."""
    with db.create_session(spec, parts=["a", "b"]) as session:
        db.store(session, name="blended")
    error, message, parts = PARTS[case]
    with pytest.raises(error, match=message):
        db.create_session(spec, parts=parts)


def test_a_chunk_of_another_model_is_refused(db, spec, stored):
    for other in (replace(spec, fingerprint="other"), replace(spec, rope=ROPES["interleaved"]), replace(spec, name="other")):
        with pytest.raises(errors.SpecMismatch, match="part 1, context 'a', holds the KV of"):
            db.create_session(other, parts=[[1], "a"])
        assert db.name_chunk(other, stored["a"].tokens, name="x") is None


@pytest.mark.parametrize("rope", UNMOVED)
def test_keys_that_cannot_be_moved(db, spec, rope):
    """Neither a chunk nor a context where it was not computed; a prefix where it was computed goes."""
    spec = replace(spec, rope=UNMOVED[rope])
    text = Text(spec, 70)
    with pytest.raises(errors.Unsupported):
        db.import_chunk(spec, text.tokens, text.pairs, name="a")
    with db.create_session(spec, []) as session:
        for layer, (k, v) in enumerate(text.pairs):
            session.update(layer, k, v)
        with pytest.raises(errors.Unsupported):
            db.store(session, name="a", tokens=text.tokens, chunk=True)
    assert db.contexts() == []
    db.import_context(spec, text.tokens, text.pairs, name="a")
    with pytest.raises(errors.Unsupported):
        db.create_session(spec, parts=[[7, 7], "a"])
    with db.create_session(spec, parts=["a"]) as session:
        assert session.reused == 70
        assert session.attend(0, ones(4, 1), ones(2, 1), ones(2, 1)).shape == (4, 1, 16)


@pytest.mark.parametrize("base", [-1, 1.5, "0", True, None.__class__, (1 << 53) + 1])
def test_a_base_that_is_no_position(db, spec, texts, base):
    text = texts["b"]
    with pytest.raises(errors.InvalidArgument, match="base is .*; expected the position of the chunk's first token"):
        db.import_chunk(spec, text.tokens, text.pairs, name="b", base=base)
    assert db.contexts() == []


def test_a_chunk_without_tokens(db, spec):
    nothing = Text(spec, 0)
    with pytest.raises(errors.InvalidArgument, match="has no tokens"):
        db.import_chunk(spec, [], nothing.pairs, name="x")


def test_tokens_or_parts(db, spec):
    for arguments in ({}, {"tokens": [1], "parts": [[1]]}):
        with pytest.raises(errors.InvalidArgument, match="takes tokens or parts="):
            db.create_session(spec, **arguments)


def test_an_overlay_that_does_not_fit_changes_nothing(spec):
    """A chunk takes 60 of 64 blocks; a fork shares that of the overlay, which is copied before there turns out to be no room."""
    with kvdb.connect(config=Config(storage=StorageConfig(arena_bytes=1 << 20, cpu_bytes_max=1 << 20))) as db:
        text, fresh = Text(spec, 30 * 64), Text(spec, 200, seed=1)
        text.store(db, "a")
        oracle = Oracle(spec, [(text, text.n)])
        with db.create_session(spec, parts=["a"]) as session:
            session.overlay(0, [5], *(x[:, :1] for x in fresh.pairs[0]))
            oracle.overlay(0, [5], *(x[:, :1] for x in fresh.pairs[0]))
            with session.fork() as twin:
                with pytest.raises(errors.CapacityError):
                    session.overlay(0, np.arange(10, 210), *fresh.pairs[0])
                positions = np.array([5, 100, 1900])
                for one in (session, twin):
                    q = fresh.q[0][:, :3]
                    out = one.attention(0, q, positions=positions)
                    assert relative_error(out, oracle.attention(0, q, positions)) <= 1e-5
            decode(session, oracle, steps=(1, 2))
