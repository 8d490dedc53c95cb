"""A plan changes no result beyond what its retrieval allows: every way through parts and heads, beside dense attention."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdb
from indexes.retrieval import Dipr, Exact, TopK, TopP
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from query_optimizer.query_options import Hints, QueryOptions
from query_optimizer.rules import Fired, base_rules
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("m", layers=1, q_heads=8, kv_heads=4, head_dim=16, dtype="float32")
GROUP, HEADS = 2, range(4)
CUTS = (700, 1300, 2000)
"""The ends of three segments: 700 of 900 tokens are visible, then 600 of 800, then all of 700."""
TAIL = 90
TOLERANCE = 2e-5
KINDS = ("flat", "coarse-bounds")
"""That overlook nothing of what is asked for."""
OPTIONAL = [rule.name for rule in base_rules()[:-1]]
RETRIEVALS = (Exact(), Dipr(0.5), Dipr(0.012), Dipr(1e-4), TopK(1), TopK(40), TopP(0.5), TopP(0.97), None)


@dataclass
class Sends:
    """Sends the heads of each part that are named for it by one kind of index, "" for none."""

    kind: str
    heads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    before: str = "hinted"

    @property
    def name(self):
        return f"sends_{self.kind or 'whole'}"

    def when(self, facts, part, heads):
        mine = tuple(head for head in self.heads.get(facts.parts.index(part), ()) if head in heads)
        return Fired(self.kind or None, mine) if mine else "none of its heads"


SENDS = [Sends(kind) for kind in ("", *KINDS)]


@pytest.fixture(scope="module")
def world():
    """A database of three segments with both kinds of index, and what was put in."""
    config = Config(
        storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
        optimizer=OptimizerConfig(short_context_tokens=64, rules_off=("short_context",)),
        window=WindowConfig(8, 16),
        indexes=IndexConfig(on_demand="", segment_tokens_min=64, tail_tokens=32),
    )
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 4, CUTS[-1] + TAIL, 16)).astype(np.float32)
    tokens = np.arange(len(k[0]), dtype=np.int32)
    with Database(config, SENDS) as database:
        begin = 0
        for number, end in enumerate(CUTS):
            more = 200 if end != CUTS[-1] else 0  # beyond what later prompts share
            ids = np.concatenate([tokens[:end], np.full(more, 50_000 + number, np.int32)])
            writing = database.begin_import(SPEC, ids, f"doc {number}")
            assert writing.start == begin
            extra = rng.standard_normal((2, 4, more, 16)).astype(np.float32)
            writing.write(0, *(np.concatenate([x[:, begin:end], e], axis=1) for x, e in zip((k, v), extra, strict=True)))
            writing.commit()
            begin = end
        for kind in KINDS:
            database.build_index(f"doc {len(CUTS) - 1}", kind)
        yield database, tokens, k, v
        database.check_integrity()


def allowed(retrieval, logits):
    """The largest share of the mass that each query may miss, by the retrieval alone: logits `[..., tokens]`."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    match retrieval:
        case Exact():
            kept = np.ones(weights.shape, bool)
        case Dipr(alpha):
            kept = weights >= alpha * weights.max(axis=-1, keepdims=True) * (1 + 1e-4)  # rounding may take either side
        case TopK(k):
            kept = weights >= np.sort(weights, axis=-1)[..., -k, None] * (1 - 1e-4)
        case TopP(p):
            return np.full(weights.shape[:-1], 1 - p + 1e-4)
    return np.where(kept, 0, weights).sum(axis=-1) + 1e-4 * (not isinstance(retrieval, Exact))


@st.composite
def asked(draw):
    ways = [{head: draw(st.sampled_from([None, "", *KINDS])) for head in HEADS} for _ in range(len(CUTS) + 1)]
    hint = draw(st.none() | st.sampled_from(KINDS))
    off = tuple(draw(st.lists(st.sampled_from(OPTIONAL), unique=True, max_size=4)))
    retrieval = draw(st.sampled_from(RETRIEVALS))
    hints = Hints(None if isinstance(retrieval, Exact) or "hinted" in off else hint, off)
    bound = draw(st.sampled_from([None, None, 0.2, 1e-3]))
    return ways, QueryOptions(retrieval, bound, hints=hints), draw(st.integers(1, TAIL - 3)), draw(st.sampled_from([1, 1, 3]))


@given(asked(), st.integers(0, 1000), st.sampled_from([1.0, 4.0, 12.0]))
def test_every_way_misses_no_more_than_its_retrieval_allows(world, asked, seed, peaked):
    database, tokens, k, v = world
    ways, wanted, tail, n = asked
    for sends in SENDS:
        sends.heads = {at: tuple(h for h in HEADS if way[h] == sends.kind) for at, way in enumerate(ways)}
    end = CUTS[-1] + tail + n
    q = peaked * np.random.default_rng(seed).standard_normal((8, end, 16)).astype(np.float32)
    session = database.create_session(SPEC, tokens[: CUTS[-1]])
    for at in range(CUTS[-1], CUTS[-1] + tail):  # the tail grows, and is sealed
        session.attend(0, q[:, at : at + 1], k[:, at : at + 1], v[:, at : at + 1], wanted)
    before = session.stats().queries
    new = slice(end - n, end)
    out = session.attend(0, q[:, new], k[:, new], v[:, new], wanted)
    plan = session.explain(0, wanted, analyze=True)
    assert session.stats().queries == before + 1
    session.close()
    exact, _ = attention(q[:, new], k[:, :end], v[:, :end], SPEC.softmax_scale, new=n)
    logits = SPEC.softmax_scale * np.einsum(
        "hnd,htd->hnt", q[:, new].astype(np.float64), k[:, :end].astype(np.float64).repeat(GROUP, axis=0)
    )
    logits = np.where(np.arange(end)[None] <= np.arange(end - n, end)[:, None], logits, -np.inf)
    missed = allowed(plan.retrieval, logits)
    if wanted.max_missed_mass is not None:
        missed = np.minimum(missed, wanted.max_missed_mass)
    largest = np.linalg.norm(v[:, :end], axis=-1).max()
    errors = np.linalg.norm(out - exact, axis=-1)
    assert (errors <= 2 * missed * largest + TOLERANCE * largest).all()
    if isinstance(plan.retrieval, Exact):
        assert relative_error(out, exact) <= TOLERANCE
    assert plan.outcome.missed_true <= missed[:, -1].mean() + 1e-4
    assert plan.outcome.missed_true <= plan.outcome.missed_bound + 1e-4
    assert (
        plan.outcome.output_error <= 2 * plan.outcome.missed_true * largest / np.linalg.norm(exact[:, -1], axis=-1).min() + 1e-4
    )


def test_heads_of_one_part_go_different_ways(world):
    """The crafted rules do what the test above relies on."""
    database, tokens, _, _ = world
    for sends, heads in zip(SENDS, [(0,), (1, 3), ()], strict=True):
        sends.heads = {0: heads, 1: heads}
    session = database.create_session(SPEC, tokens[: CUTS[-1]])
    plan = session.explain(0, QueryOptions(Dipr()))
    session.close()
    ways = [(access.index, access.heads) for access in plan.accesses if access.rule != "window"]
    of_one = [(None, (0,)), ("flat", (1, 3)), ("coarse-bounds", (2,))]
    assert [way for way in ways[:3] if way[1] != (2,)] == of_one[:2]
    assert ways[2][1] == (2,)
    assert len(ways) == 7
