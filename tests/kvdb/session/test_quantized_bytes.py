"""What is counted of quantized segments, before and after a query, is what is read of them."""

import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.storage.block_layout import BlockLayout
from tests.database import database, small_config

SPEC = kvdb.ModelSpec("small", 2, 8, 2, 64, "bfloat16", rope=kvdb.Rope(10000.0))
TOKENS = 640


@pytest.mark.parametrize("first", ["int8", ""])
def test_bytes_are_those_of_the_formats(make_kv, first):
    kv = make_kv(SPEC, TOKENS + 2)
    with database() as engine, Client(engine) as db:
        short = db.import_context(SPEC, kv.tokens[:320], kv.pairs(0, 320), name="short", format=first)
        doc = db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc", format="int4")
        assert sum(tier.blocks_used * tier.block_nbytes for tier in db.tiers()) == doc.info.nbytes
        stored = doc.info.nbytes // SPEC.layers
        assert short.info.nbytes > doc.info.nbytes // 2
        assert stored < (0.5 if first else 0.75) * TOKENS * SPEC.token_nbytes
        with db.create_session(SPEC, kv.tokens[:TOKENS]) as session:
            for i in (0, 1):  # the second may be one call of native code
                new = [x[1][:, TOKENS + i : TOKENS + i + 1] for x in (kv.q, kv.k, kv.v)]
                before = session.stats().bytes_read
                session.attend(1, *new, retrieval=kvdb.Exact())
                assert session.stats().bytes_read - before == stored + (i + 1) * SPEC.token_nbytes
            plan = session.explain(1, analyze=True, retrieval=kvdb.Exact())
            assert plan.actual.nbytes == stored + 2 * SPEC.token_nbytes
            assert sum(access.estimate.nbytes for access in plan.accesses) == pytest.approx(plan.actual.nbytes, rel=0.01)


@pytest.mark.parametrize("formats", [("int8", "int8-int4"), ("", "int4"), ("int8-int4", "")])
def test_searches_read_values_in_the_format_of_each_segment(make_kv, formats):
    """What a step counts, carried out by native code or not, is what EXPLAIN ANALYZE finds in each of its parts."""
    kv = make_kv(SPEC, TOKENS + 3)
    with database(config=small_config()) as engine, Client(engine) as db:
        for end, stored in zip((320, TOKENS), formats, strict=True):
            db.import_context(SPEC, kv.tokens[:end], kv.pairs(0, end), name=str(end), format=stored)
            db.build_index(str(end), "flat")
        with db.create_session(SPEC, kv.tokens[:TOKENS]) as session:
            options = kvdb.QueryOptions(kvdb.Dipr(0.5), hints=kvdb.Hints(index="flat"))
            for i in (0, 1, 2):  # the last may be one call of native code
                new = [x[1][:, TOKENS + i : TOKENS + i + 1] for x in (kv.q, kv.k, kv.v)]
                before = session.stats().bytes_read
                session.attend(1, *new, options=options)
                read = session.stats().bytes_read - before
            plan = session.explain(1, analyze=True, options=options)
        searches = [access for access in plan.accesses if access.index is not None]
        assert len(searches) == 2
        assert all(access.actual.tokens for access in searches)
        assert sum(access.actual.nbytes for access in plan.accesses) == pytest.approx(read, abs=2)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float32", 64)])
def test_bytes_of_keys_and_of_values_are_all_bytes(dtype, head_dim):
    raw = BlockLayout(dtype, 2, head_dim, 64)
    layouts = [raw, *map(raw.in_format, ("int8", "int8-int4", "int4"))]
    plain, eight, mixed, four = (layout.value_nbytes for layout in layouts)
    assert 2 * plain == raw.token_nbytes
    assert eight + mixed == pytest.approx(layouts[2].token_nbytes, rel=0.01)  # its keys are those of eight bits
    assert plain > eight > mixed == four
