"""What is counted of quantized segments, before and after a query, is what is read of them."""

import pytest

import kvdb
from kvdb.client.client import Client
from tests.database import database

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
