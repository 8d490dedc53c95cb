"""Chunks laid out in any order, read as they are: attention over the moved keys."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import kvdb
from tests.kvdb.blend.decoding import decode
from tests.kvdb.blend.oracle import ROPES, TOLERANCE, Oracle, Text, make_texts
from tests.reference import relative_error

PARTS = {
    "one": ["a"],
    "in order": ["a", "b", "c"],
    "in another order": ["c", "b", "a"],
    "twice": ["b", "a", "b", "b"],
    "the first tokens": [("a", 64), ("b", 1), ("c", 37), ("a", 129)],
    "many": ["abcd"[i % 4] for i in range(40)],
}


def named(texts, parts):
    """Parts of names and (name, visible), for `create_session` and for the oracle."""
    pairs = [part if isinstance(part, tuple) else (part, texts[part].n) for part in parts]
    laid = [part if isinstance(part, str) else kvdb.PromptPart(part[0], visible=part[1]) for part in parts]
    return laid, [(texts[name], visible) for name, visible in pairs]


@pytest.mark.parametrize("parts", PARTS)
def test_chunks_in_any_order(db, spec, parts):
    stored = make_texts(spec)
    for name, text in stored.items():
        info = text.store(db, name).info
        assert (info.chunk, info.blended, info.tokens) == (True, False, text.n)
    laid, known = named(stored, PARTS[parts])
    with db.create_session(spec, parts=laid) as session:
        assert session.start == session.reused == sum(visible for _, visible in known)
        assert session.tokens.tolist() == np.concatenate([text.tokens[:visible] for text, visible in known]).tolist()
        edges = np.cumsum([0, *(visible for _, visible in known)]).tolist()
        assert [(p.begin, p.end) for p in session.layout] == list(pairwise(edges))
        assert [p.kind for p in session.layout][1:] == ["chunk"] * (len(known) - 1)
        decode(session, Oracle(spec, known))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_whose_keys_can_be_moved(db, spec, rope, dtype):
    spec = replace(spec, rope=ROPES[rope], dtype=dtype)
    stored = make_texts(spec)
    for name, text in stored.items():
        text.store(db, name)
    laid, known = named(stored, ["c", ("a", 100), "b", "a", "d"])
    with db.create_session(spec, parts=laid) as session:
        decode(session, Oracle(spec, known))
        positions = np.array([0, 7, 63, 64, 99, 234])
        q = Text(spec, 6, seed=5).q[1]
        expected = Oracle(spec, known).attention(1, q, positions)
        assert relative_error(session.attention(1, q, positions=positions), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_blocks_of_any_size(spec, block_size):
    config = kvdb.Config(storage=kvdb.config.StorageConfig(block_size=block_size, arena_bytes=1 << 20))
    with kvdb.connect(config=config) as db:
        stored = make_texts(spec)
        for name, text in stored.items():
            text.store(db, name)
        laid, known = named(stored, ["b", "c", ("a", 33), "d", "b"])
        with db.create_session(spec, parts=laid) as session:
            oracle = Oracle(spec, known)
            fresh, again = Text(spec, 60, seed=9), np.arange(20, 200, 3)
            for layer in range(spec.layers):
                k, v = fresh.k[layer], fresh.v[layer]
                session.overlay(layer, again, k, v)
                oracle.overlay(layer, again, k, v)
                out = session.attention(layer, fresh.q[layer], positions=again)
                assert relative_error(out, oracle.attention(layer, fresh.q[layer], again)) <= 1e-5
            decode(session, oracle)


def test_a_prefix_comes_first_and_stays_exact(db, spec):
    """A context of two segments, the second of which was computed behind the first, and a chunk behind it."""
    stored = make_texts(spec)
    stored["b"].store(db, "b")
    prompt, more = Text(spec, 90, seed=5), Text(spec, 150, seed=6)
    db.import_context(spec, prompt.tokens, prompt.pairs, name="prompt")
    tokens = np.concatenate([prompt.tokens, more.tokens])
    whole = [
        tuple(np.concatenate(both, axis=1) for both in zip(one, other, strict=True))
        for one, other in zip(prompt.pairs, more.pairs, strict=True)
    ]
    assert db.import_context(spec, tokens, whole, name="longer").info.segments == 2
    for first in ("longer", tokens):  # by its name, and found by its tokens
        with db.create_session(spec, parts=[first, "b"]) as session:
            assert session.reused == session.start == 310
            assert {p.kind for p in session.layout[:-1]} == {"prefix"}
            assert session.layout[-1] == kvdb.Placed(240, 310, "chunk")
            decode(session, Oracle(spec, [(prompt, 90), (replace(more, base=90), 150), (stored["b"], 70)]))


def test_tokens_that_begin_like_a_stored_context_are_not_all_gaps(db, spec):
    stored = make_texts(spec)
    stored["b"].store(db, "b")
    prompt = Text(spec, 90, seed=5)
    db.import_context(spec, prompt.tokens, prompt.pairs, name="prompt")
    with db.create_session(spec, parts=[[*prompt.tokens[:80], 7000, 7001], "b"]) as session:
        assert (session.start, session.reused) == (152, 150)
        assert [(p.begin, p.end, p.kind) for p in session.layout] == [(0, 80, "prefix"), (80, 82, "tokens"), (82, 152, "chunk")]
        oracle = Oracle(spec, [(prompt, 80), 2, (stored["b"], 70)])
        fresh = Text(spec, 2, seed=8)
        for layer, (k, v) in enumerate(fresh.pairs):
            session.overlay(layer, [80, 81], k, v)
            oracle.overlay(layer, [80, 81], k, v)
        decode(session, oracle)


def test_the_prompts_end_is_not_laid_out(db, spec):
    stored = make_texts(spec)
    stored["b"].store(db, "b")
    with db.create_session(spec, parts=[[1, 2, 3], "b", [4, 5], [6]]) as session:
        assert (session.start, session.reused, len(session.tokens)) == (73, 70, 76)
        assert session.tokens[-3:].tolist() == [4, 5, 6]
    with db.create_session(spec, parts=[[1, 2], [3]]) as session:
        assert (session.start, session.reused, session.layout, session.tokens.tolist()) == (0, 0, (), [1, 2, 3])
        decode(session, Oracle(spec))


def test_one_chunk_where_it_was_computed_is_a_prefix(db, spec):
    text = Text(spec, 100)
    text.store(db, "a")
    with db.create_session(spec, text.tokens) as session:
        assert session.reused == 100
        decode(session, Oracle(spec, [(text, 100)]))


def test_explain_tells_what_was_moved_and_what_is_seen(db, spec):
    stored = make_texts(spec)
    for name, text in stored.items():
        text.store(db, name)
    with db.create_session(spec, parts=["c", kvdb.PromptPart("a", visible=100), "b"]) as session:
        fresh = Text(spec, 3)
        session.overlay(0, [3, 70, 71], *fresh.pairs[0])
        plan = str(session.explain(0))
        for line in (
            "Shift: -5,000 positions, by rotating the query",
            "Shift: +64 positions, by rotating the query",
            "Shift: +151 positions, by rotating the query",
            "Filter: the first 100 of 130 tokens are visible",
            "Filter: 1 recomputed tokens are masked",
            "Filter: 2 recomputed tokens are masked",
            "Exact Scan on overlay",
        ):
            assert line in plan
        assert "masked" not in str(session.explain(1))
