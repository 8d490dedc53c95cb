"""What every kind of index promises, for keys made to mislead it: against brute force over small layers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.coarse.bounds import Bounds
from indexes.coarse.clusters import Clusters
from indexes.coarse.means import Means
from indexes.flat import Flat
from indexes.hnsw import Hnsw
from indexes.quantized import Quantized
from indexes.retrieval import Dipr, TopK, TopP
from tests.indexes.coarse_data import log_sum, logits, pack, rows

HEAD_DIM, KV_HEADS, GROUP = 32, 2, 2
SCALE = HEAD_DIM**-0.5
KINDS = [Flat, Bounds, Means, Clusters, Hnsw, Quantized]
SHARE_KINDS = [Flat, Bounds, Clusters]
"""Those that find the share of the mass that is asked for. The others go by estimates, and say so."""


def spread_keys(rng, tokens):
    return rng.standard_normal((KV_HEADS, tokens, HEAD_DIM))


def equal_keys(rng, tokens):
    """Every page looks like every other."""
    return np.repeat(rng.standard_normal((KV_HEADS, 1, HEAD_DIM)), tokens, axis=1)


def opposite_keys(rng, tokens):
    """Neighbours cancel, so that means of pages say nothing."""
    return spread_keys(rng, 1) * np.where(np.arange(tokens) % 2, -1.0, 1.0)[None, :, None]


def outlier_keys(rng, tokens):
    """One key in fifty is thirty times as long as the others."""
    return spread_keys(rng, tokens) * np.where(rng.random((KV_HEADS, tokens, 1)) < 0.02, 30.0, 1.0)


def zero_keys(rng, tokens):
    return np.zeros((KV_HEADS, tokens, HEAD_DIM))


def distant_keys(rng, tokens):
    """Logits so far apart that float32 has no exponential of the difference."""
    keys = 0.01 * spread_keys(rng, tokens)
    keys[:, rng.integers(tokens)] = 1.0
    return 400 * keys


def near_keys(rng, tokens):
    """So long, and so near to each other, that float32 does not tell which has the largest product."""
    return 1e5 * spread_keys(rng, 1) * (1 + 1e-6 * spread_keys(rng, tokens))


MAKERS = [spread_keys, equal_keys, opposite_keys, outlier_keys, zero_keys, distant_keys, near_keys]


@dataclass(frozen=True)
class Search:
    """Blocks, and queries over a part of them."""

    keys: Callable[[np.random.Generator, int], np.ndarray]
    tokens: int
    seed: int
    length: float
    along_keys: bool
    hidden: float
    begins: tuple[int, int]
    ends: tuple[int, int]

    def made(self) -> tuple[Blocks, Queries]:
        rng = np.random.default_rng(self.seed)
        keys = self.keys(rng, self.tokens).astype(np.float32)
        q = self.length * rng.standard_normal((KV_HEADS * GROUP, 2, HEAD_DIM))
        if self.along_keys:  # or against them
            q = np.repeat(keys[:, rng.integers(self.tokens), None, :], GROUP, axis=0) * np.sign(q[..., :1])
        hidden = pack(rng.random(self.tokens) < self.hidden)
        none = np.full(q.shape[:2], -np.inf, np.float32)
        blocks = Blocks.of(keys, rng.standard_normal(keys.shape).astype(np.float32))
        q = np.ascontiguousarray(q, np.float32)
        begins, ends = np.array(self.begins, np.int64), np.array(self.ends, np.int64)
        return blocks, Queries(q, KV_HEADS, SCALE, begins, ends, none, none, hidden)


@st.composite
def searches(draw):
    tokens = draw(st.integers(1, 600))
    first, second, third, fourth = sorted(draw(st.lists(st.integers(0, tokens), min_size=4, max_size=4)))
    return Search(
        draw(st.sampled_from(MAKERS)),
        tokens,
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([0.1, 1.0, 10.0, 60.0])),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.5])),
        (first, second),
        (third, fourth),
    )


def masses(queries, found, x):
    """Of each row the logs of the mass that was found and of what was missed, in truth."""
    for row, ids in enumerate(rows(found)):
        rest = x[row].copy()
        rest[ids] = -np.inf
        yield log_sum(x[row, ids], queries.scale), log_sum(rest, queries.scale)


def rounding(blocks, queries):
    """What float32 may lose of a logit, `[rows]`; see `indexes.base.SearchResult`. And a little that float64 loses of a sum."""
    longest = max(np.linalg.norm(blocks.keys(head).astype(np.float64), axis=1).max() for head in range(KV_HEADS))
    lengths = np.linalg.norm(queries.q.astype(np.float64), axis=-1).reshape(-1)
    return queries.scale * (HEAD_DIM + 16) * 2.0**-24 * longest * lengths + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@given(search=searches(), k=st.integers(1, 80))
def test_top_k_finds_k_tokens_or_all_that_are_visible(kind, search, k):
    blocks, queries = search.made()
    found = kind.build(blocks).search(queries, TopK(k))
    visible = np.isfinite(logits(blocks, queries)).sum(axis=1)
    np.testing.assert_array_equal(np.diff(found.offsets), np.minimum(visible, k))


@pytest.mark.parametrize("kind", SHARE_KINDS)
@given(search=searches(), p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]), give_up=st.booleans())
def test_top_p_finds_the_share_p(kind, search, p, give_up):
    finds_the_share(kind, search, p, give_up)


def test_a_page_whose_priority_is_small_beside_its_terms_is_not_lost_to_rounding(isa):
    """The queries turn from the only visible key to its opposite: on the way, what the middle of its page lacks is about what
    the reach adds."""
    rng = np.random.default_rng(0)
    keys = (rng.standard_normal((8, 1, HEAD_DIM)) + 0.3 * rng.standard_normal((8, 200, HEAD_DIM))).astype(np.float32)
    index = Clusters.build(Blocks.of(keys, keys))
    first = keys[:, :1] / np.linalg.norm(keys[:, :1], axis=2, keepdims=True)
    other = rng.standard_normal(first.shape)
    other -= (other * first).sum(axis=2, keepdims=True) * first
    other /= np.linalg.norm(other, axis=2, keepdims=True)
    none = np.full((8, 1), -np.inf, np.float32)
    for angle in np.linspace(0.3 * np.pi, 0.9 * np.pi, 300):
        q = np.ascontiguousarray(np.cos(angle) * first + np.sin(angle) * other, np.float32)
        queries = Queries(q, 8, SCALE, np.array([0]), np.array([1]), none, none)
        found = index.search(queries, TopP(0.1), give_up=False)
        assert (np.diff(found.offsets) == 1).all()


@pytest.mark.parametrize("kind", SHARE_KINDS)
def test_a_share_of_weights_that_no_double_holds_is_found(kind):
    """Beside 1, the exponential of each logit is 0; beside each other they are not."""
    for seed in range(40):
        finds_the_share(kind, Search(near_keys, 458, seed, 1.0, False, 0.0, (0, 0), (458, 458)), 0.5, give_up=False)


def finds_the_share(kind, search, p, give_up):
    blocks, queries = search.made()
    found = kind.build(blocks).search(queries, TopP(p), give_up=give_up)
    slack = rounding(blocks, queries)
    for row, (inside, missed) in enumerate(masses(queries, found, logits(blocks, queries))):
        left = found.dense is not None and found.dense.reshape(-1)[row]
        assert left or missed == -np.inf or inside >= np.log(p) + np.logaddexp(inside, missed) - 2 * slack[row]


@pytest.mark.parametrize("kind", KINDS)
@given(
    search=searches(),
    retrieval=st.sampled_from([Dipr(0.5), Dipr(1e-6), TopK(1), TopK(20), TopP(0.5)]),
    tight=st.booleans(),
    tail=st.booleans(),
)
def test_what_was_missed_is_never_reported_as_nothing(kind, search, retrieval, tight, tail):
    blocks, queries = search.made()
    found = kind.build(blocks).search(queries, retrieval, tight=tight, estimate_tail=tail)
    slack = rounding(blocks, queries)
    for row, (_, missed) in enumerate(masses(queries, found, logits(blocks, queries))):
        estimate, bound = found.missed.reshape(-1)[row], found.missed_bound.reshape(-1)[row]
        assert not np.isnan(estimate)
        assert (estimate == -np.inf) == (missed == -np.inf)
        assert estimate <= bound
        assert bound >= missed - slack[row], "in float64, but for what float32 loses of the scores"
    assert found.tail is None or np.isfinite(found.tail).all()


@pytest.mark.parametrize("maker", [spread_keys, outlier_keys, distant_keys])
@pytest.mark.parametrize("kind", [Means, Clusters])
def test_pages_that_mislead_are_read_until_k_tokens_and_the_share_p_are_found(kind, maker):
    """A layer so long that pages are chosen by what is estimated of them."""
    tokens = 9000
    for along_keys in (False, True):
        blocks, queries = Search(maker, tokens, 1, 10.0, along_keys, 0.0, (0, 0), (tokens, tokens)).made()
        index, x = kind.build(blocks), logits(blocks, queries)
        for k in (1, 10, 100):
            assert (np.diff(index.search(queries, TopK(k)).offsets) == k).all()
        for p in (0.1, 0.9) if kind is Clusters else ():
            found = index.search(queries, TopP(p))
            for inside, missed in masses(queries, found, x):
                assert inside >= np.log(p) + np.logaddexp(inside, missed) - 1e-2
