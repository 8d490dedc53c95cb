"""What a search over several parts reads, and what it says of what it left out."""

import numpy as np
import pytest

import kvdb
from indexes.retrieval import Dipr, TopK, TopP, Wanted
from kvdb.attention.run import Run
from kvdb.attention.sparse import Question, Searched, Sections, sparse
from kvdb.config import StorageConfig
from kvdb.storage.store import BlockStore
from tests.reference import attention, relative_error
from tests.scan import Scan

BLOCK, PARTS, TOKENS = 16, 3, 320
SPEC = kvdb.ModelSpec("m", 1, 1, 1, 16, "float32")
SCALE = SPEC.softmax_scale


class Layer:
    """Three segments of 320 tokens and a tail of 5, with an index over all of a segment but its first and last block.

    weights: scores of chosen tokens, which are aimed at by their keys; all others are near -30.
    """

    def __init__(self, weights):
        rng = np.random.default_rng(3)
        n = PARTS * TOKENS + 5
        self.q = np.zeros((1, 1, 16), np.float32)
        self.q[..., 0] = 1 / SCALE
        self.k = rng.standard_normal((1, n, 16)).astype(np.float32) * 0.1
        self.k[0, :, 0] -= 30
        self.v = rng.standard_normal((1, n, 16)).astype(np.float32)
        for token, logit in weights.items():
            self.k[0, token, 0] = logit
        self.store = BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20))
        self.tables = [self.store.tables(SPEC)[0] for _ in range(PARTS + 1)]
        for i, table in enumerate(self.tables):
            part = slice(i * TOKENS, (i + 1) * TOKENS)
            table.append(self.k[:, part], self.v[:, part])
        self.layout = self.tables[0].layout
        self.run = Run([(table, TOKENS) for table in self.tables[:-1]], self.tables[-1])
        blocks = TOKENS // BLOCK
        searched = [
            Searched(Scan(table.keys(TOKENS)), BLOCK, TOKENS - BLOCK, i * blocks) for i, table in enumerate(self.tables[:-1])
        ]
        self.sections = Sections(searched, BLOCK)

    def ask(self, wanted):
        return sparse(Question(self.layout, self.run, self.q, SCALE, wanted), self.sections, wanted.retrieval)

    def truth(self, attended):
        """The share of the mass outside of these tokens, and the attention over them."""
        logits = SCALE * (self.k[0].astype(np.float64) @ self.q[0, 0])
        mass = np.exp(logits - logits.max())
        out, _ = attention(self.q, self.k[:, attended], self.v[:, attended], SCALE)
        return 1 - mass[attended].sum() / mass.sum(), out

    def whole(self):
        """The tokens that no index covers."""
        t = np.arange(PARTS * TOKENS + 5)
        return (t % TOKENS < BLOCK) | (t % TOKENS >= TOKENS - BLOCK) | (t >= PARTS * TOKENS)

    def close(self):
        for table in self.tables:
            table.release()
        self.store.close()


FOUND = {40: 5.0, 41: 2.0, 400: 8.0, 401: 4.5, 720: 9.0, 721: 7.5}
"""The first segment's largest is far below the last's, so that what is found in it is not wanted once all is known."""

ASKED = {
    "dipr": (Dipr(0.1), [400, 720, 721]),
    "a wide dipr": (Dipr(0.001), [40, 400, 401, 720, 721]),
    "top_k": (TopK(2), [400, 720]),
    "top_p": (TopP(0.999), None),
}


@pytest.fixture
def layer():
    made = Layer(FOUND)
    yield made
    made.close()


@pytest.mark.parametrize("asked", ASKED)
def test_the_wanted_tokens_of_all_parts_are_read_and_the_rest_is_told(layer, asked):
    retrieval, tokens = ASKED[asked]
    state, reading = layer.ask(Wanted(retrieval))
    if tokens is None:
        assert reading.missed_bound_max <= 0.03  # loose by a factor of e**3
        assert reading.missed <= 0.001
        return
    attended = layer.whole()
    attended[tokens] = True
    share, out = layer.truth(attended)
    assert relative_error(state.out, out) <= 1e-5
    assert reading.missed == pytest.approx(share, rel=1e-3)
    assert share <= reading.missed_bound == reading.missed_bound_max
    assert reading.retrieved == attended.sum()
    assert reading.scanned == PARTS * TOKENS + 5


def test_it_reads_on_until_the_bound_holds(layer):
    _, first = layer.ask(Wanted(Dipr(0.5)))
    _, tight = layer.ask(Wanted(Dipr(0.5), first.missed * 1.01))
    _, wider = layer.ask(Wanted(Dipr(0.5), 1e-3))
    assert tight.retrieved == first.retrieved
    assert tight.nbytes > first.nbytes
    assert wider.retrieved > first.retrieved
    assert wider.missed_bound_max <= 1e-3


def test_a_bound_that_cannot_hold_reads_everything(layer):
    state, reading = layer.ask(Wanted(TopK(1), 1e-15))
    dense, _ = attention(layer.q, layer.k, layer.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert (reading.missed, reading.missed_bound_max, reading.retrieved) == (0, 0, PARTS * TOKENS + 5)


def test_the_estimate_of_what_was_not_found_completes_the_output(layer):
    """The stand-in's estimate is the truth, and nothing that was found is thrown away for it."""
    state, _ = layer.ask(Wanted(Dipr(0.5), estimate_tail=True))
    dense, lse = attention(layer.q, layer.k, layer.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert state.lse == pytest.approx(lse, abs=1e-4)


def test_where_everything_is_alike_everything_is_read():
    flat = Layer(dict.fromkeys(range(PARTS * TOKENS + 5), 1.0))
    state, reading = flat.ask(Wanted(Dipr(0.012)))
    dense, _ = attention(flat.q, flat.k, flat.v, SCALE)
    assert relative_error(state.out, dense) <= 1e-5
    assert reading.retrieved == PARTS * TOKENS + 5
    flat.close()
