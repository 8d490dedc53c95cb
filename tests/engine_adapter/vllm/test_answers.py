"""Rows of vLLM's batches, and the sessions that answer them, without vLLM: dense attention over all tokens is the oracle."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.answers import Answers, place
from engine_adapter.vllm.attention_options import AttentionOptions
from engine_adapter.vllm.presence import Presence
from engine_adapter.vllm.requests import Decoding
from kvdb.errors import InvalidArgument
from tests.engine_adapter.vllm.conftest import BLOCK
from tests.reference import TOLERANCE, attention, relative_error

N = 40
FIRST, SECOND = (9, 2, 5), (1, 8, 3)


def batch_of(*rows, columns=4):
    """The metadata of rows, each a triple of its blocks, how many tokens it has, and how many of them are of the step."""
    table = torch.zeros((len(rows), columns), dtype=torch.int32)
    for i, (blocks, _, _) in enumerate(rows):
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum([count for _, _, count in rows])], dtype=torch.int32)
    lengths = torch.tensor([length for _, length, _ in rows], dtype=torch.int32)
    return SimpleNamespace(query_start_loc=starts, seq_lens=lengths, block_table=table)


def decode_of(blocks, computed, name="r", tokens=()):
    return Decoding(name, np.asarray(tokens, np.int32), "", computed, blocks)


def test_rows_are_found_by_their_blocks_whatever_their_order():
    shared = (7, 4)
    batch = batch_of(((*shared, 3), 40, 1), ((6,), 9, 9), ((*shared, 5), 41, 1))
    assert place(batch, [decode_of((*shared, 5), 40), decode_of((*shared, 3), 39)], BLOCK) == [2, 0]


@pytest.mark.parametrize(
    "row",
    [((9, 2, 5), 39, 1), ((9, 2, 5), 41, 2), ((9, 1, 5), 41, 1), ((9, 2, 6), 41, 1)],
    ids=["length", "count", "block", "last"],
)
def test_a_row_that_differs_is_not_taken(row):
    assert place(batch_of(row), [decode_of((9, 2, 5), 40)], BLOCK) == [None]


def test_a_request_whose_blocks_are_too_few_is_not_taken():
    assert place(batch_of(((9, 2, 5), 41, 1)), [decode_of((9, 2), 40)], BLOCK) == [None]


@pytest.fixture
def opener():
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def kvs(make_kv, spec):
    """The KV of two requests."""
    return make_kv(spec, N + 8), make_kv(spec, N + 8)


@pytest.fixture
def caches(packing, kvs, spec):
    """Both of them in blocks."""
    caches = {layer: packing.cache() for layer in range(spec.layers)}
    for kv, blocks in zip(kvs, (FIRST, SECOND), strict=True):
        for layer, cache in caches.items():
            filled = packing.filled(kv.k[layer], kv.v[layer], blocks)
            cache[list(blocks)] = filled[list(blocks)]
    return caches


@pytest.fixture
def answers(db, spec, layout, caches, opener):
    contexts = ModelContexts(db, spec, "vllm")
    options = AttentionOptions.parse({"from_tokens": 16, "retrieval": "exact"})
    opened = Answers(contexts, layout, caches, options, opener.submit, Presence())
    yield opened
    opened.close()
    opener.submit(int).result()


@pytest.fixture
def stored(db, spec, kvs):
    for name, kv in zip("ab", kvs, strict=True):
        db.import_context(spec, kv.tokens[:N], [(k[:, :N], v[:, :N]) for k, v in zip(kv.k, kv.v, strict=True)], name=name)


class Steps:
    """Decode steps of the two requests, in vLLM's order: the second, another one, the first."""

    def __init__(self, answers, kvs, spec, opener):
        self.answers, self.kvs, self.spec, self.opener = answers, kvs, spec, opener
        self.rng = np.random.default_rng(3)

    def begin(self, computed, ended=()):
        first, second = self.kvs
        decodes = [
            decode_of(FIRST, computed, "first", first.tokens[:N]),
            decode_of(SECOND, computed, "second", second.tokens[:N]),
        ]
        self.answers.begin([decode for decode in decodes if decode.request not in ended], frozenset(ended))
        batch = batch_of((SECOND, computed + 1, 1), ((6,), 9, 9), (FIRST, computed + 1, 1))
        return self.answers.once(batch, list)

    def opened(self):
        self.opener.submit(int).result()

    def attend(self, computed, layer, rows=(0, 2)):
        order = [self.kvs[1], None, self.kvs[0]]
        q = self.rng.standard_normal((len(rows), self.spec.q_heads, self.spec.head_dim)).astype(np.float32)
        k, v = (np.stack([getattr(order[i], name)[layer][:, computed] for i in rows]) for name in "kv")
        out = self.answers.attend(layer, *map(torch.tensor, (q, k, v)))
        kvs = [[half[layer][:, : computed + 1] for half in (order[i].k, order[i].v)] for i in rows]
        expected = [attention(q[n][:, None], *kv, self.scale)[0][:, 0] for n, kv in enumerate(kvs)]
        return out, np.stack(expected)

    @property
    def scale(self):
        return self.spec.head_dim**-0.5


@pytest.fixture
def steps(answers, kvs, spec, opener):
    return Steps(answers, kvs, spec, opener)


def check_step(steps, computed, rows=(0, 2)):
    for layer in range(steps.spec.layers):
        out, expected = steps.attend(computed, layer, rows)
        assert relative_error(out, expected) < TOLERANCE["float32"]


def test_requests_are_answered_from_their_sessions(steps, stored):
    assert steps.begin(N) == [], "their sessions are not open yet"
    assert steps.answers.attend(0, *(torch.empty(0),) * 3) is None
    steps.opened()
    for computed in range(N + 1, N + 4):  # the first of them takes what vLLM computed meanwhile out of the blocks
        assert steps.begin(computed) == [0, 2]
        check_step(steps, computed)


def test_a_request_that_ended_is_not_answered_and_its_session_is_closed(steps, stored):
    steps.begin(N)
    steps.opened()
    steps.begin(N + 1)
    assert sorted(steps.answers.sessions()) == ["first", "second"]
    assert steps.begin(N + 2, ended=["second"]) == [2]
    assert list(steps.answers.sessions()) == ["first"]
    check_step(steps, N + 2, rows=(2,))


def test_a_request_that_ends_while_it_is_opened_leaves_nothing(steps, stored):
    steps.begin(N)
    steps.begin(N + 1, ended=["first", "second"])
    steps.opened()
    assert not steps.answers.sessions()


def test_a_row_that_is_not_found_is_vllms_for_the_step_only(steps, stored, caplog):
    steps.begin(N)
    steps.opened()
    steps.begin(N + 1)
    assert steps.answers.once(batch_of((FIRST, N + 2, 1)), list) == [0]
    assert "does not find second" in caplog.text
    assert steps.begin(N + 2) == [0, 2]
    check_step(steps, N + 2)


def test_a_request_that_is_not_stored_is_left_to_vllm(steps, caplog):
    steps.begin(N)
    steps.opened()
    assert steps.begin(N + 1) == []
    assert caplog.text.count("0 of its tokens are stored") == 2
    assert steps.begin(N + 2) == []
    assert not steps.answers.sessions()


def test_requests_whose_database_goes_are_left_to_vllm(steps, stored, db, caplog):
    steps.begin(N)
    steps.opened()
    assert steps.begin(N + 1) == [0, 2]
    assert steps.attend(N + 1, 0)[0] is not None
    db.close()
    assert steps.attend(N + 1, 1)[0] is None
    assert caplog.text.count("vLLM answers") == 2
    assert steps.begin(N + 2) == []


@pytest.mark.parametrize(
    ("given", "query"),
    [
        ({}, kvdb.QueryOptions()),
        ({"retrieval": "exact"}, kvdb.QueryOptions(kvdb.Exact())),
        ({"retrieval": {"dipr": 0.012}}, kvdb.QueryOptions(kvdb.Dipr(0.012))),
        ({"retrieval": {"top_k": 50}, "estimate_tail": True}, kvdb.QueryOptions(kvdb.TopK(50), estimate_tail=True)),
        ({"error_max": 0.02}, kvdb.QueryOptions(error_max=0.02)),
    ],
)
def test_options_say_what_queries_ask_for(given, query):
    assert AttentionOptions.parse({"from_tokens": 7} | given) == AttentionOptions(7, query)


def test_nothing_configures_nothing():
    assert AttentionOptions.parse(None) is None


@pytest.mark.parametrize(
    "given",
    [
        7,
        {},
        {"from_tokens": 0},
        {"from_tokens": True},
        {"from_tokens": 1, "retrieval": {"nearest": 3}},
        {"from_tokens": 1, "retrieval": "dipr"},
        {"from_tokens": 1, "error": 0.1},
        {"from_tokens": 1, "error_max": 2},
    ],
)
def test_options_that_cannot_be_are_refused(given):
    with pytest.raises(InvalidArgument):
        AttentionOptions.parse(given)
