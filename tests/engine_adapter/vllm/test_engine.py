"""vLLM itself over kvdb, with SmolLM2 on the CPU: its tokens are those of vLLM without kvdb. `make vllm-test` runs these."""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer

import kvdb
from engine_adapter.transformers import attach
from kvdb.client.client import Client
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.engine_adapter.vllm.conftest import MODEL, documents

NEW_TOKENS = 12
BLOCK = 128
"""vLLM's own on the CPU."""


def ask(prompt, **fields):
    return {"prompt": prompt, "tokens": NEW_TOKENS, **fields}


@pytest.fixture(scope="module")
def prompts(vllm_run):
    """Prose, and what leaves it inside a block, goes on behind it, or is other prose."""
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(documents()).ids
    return SimpleNamespace(
        first=text[:420],
        left=[*text[:170], *text[1000:1200]],
        longer=text[:600],
        others=[text[2000:2300], text[3000:3310], text[4000:4290]],
        crowd=[text[5000 + 400 * i : 5300 + 400 * i] for i in range(3)],
    )


@pytest.fixture(scope="module")
def plain(vllm_run, prompts):
    """vLLM without kvdb and without a cache of prefixes."""
    alone = [[ask(prompts.first)], [ask(prompts.left)], [ask(prompts.longer)], [ask(prompt) for prompt in prompts.others]]
    crowd = [ask(prompt) | {"tokens": 120} for prompt in prompts.crowd]
    return vllm_run([*alone, crowd], enable_prefix_caching=False)[0]["calls"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kvdb") / "store")


@pytest.fixture(scope="module")
def first(vllm_run, prompts, target):
    """The first process on kvdb: a prompt alone, and a batch with a neighbour that is cancelled in the midst of its prompt."""
    batch = [*(ask(prompt) for prompt in prompts.others), ask(prompts.crowd[0], cancel=2)]
    return vllm_run([[ask(prompts.first)], batch], target, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def second(vllm_run, prompts, target, first):
    calls = [[ask(prompts.first)], [ask(prompts.left)], [ask(prompts.longer)], [ask(prompt) for prompt in prompts.others]]
    return vllm_run([*calls, [ask(prompts.first, salt="tenant")]], target)


def tokens(answers):
    return [answer[0] for answer in answers]


def cached(answers):
    return [answer[1] for answer in answers]


def alike(one, other):
    """How many tokens two prompts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_first_process_answers_as_vllm_does(first, plain):
    calls = first[0]["calls"]
    assert tokens(calls[0]) == tokens(plain[0])
    assert tokens(calls[1][:3]) == tokens(plain[3])
    assert calls[1][3] is None, "it was cancelled"
    assert "kvdb steps aside" not in first[1]


def test_a_second_process_finds_what_the_first_computed(second, prompts, plain):
    calls = second[0]["calls"]
    assert cached(calls[0]) == [len(prompts.first) - 1]
    assert cached(calls[3]) == [len(prompt) - 1 for prompt in prompts.others]
    assert tokens(calls[0]) == tokens(plain[0])
    assert tokens(calls[3]) == tokens(plain[3])
    assert "kvdb steps aside" not in second[1]


def test_a_hit_ends_inside_a_block(second, prompts, plain):
    """The answer of the first prompt is stored too, and begins as the longer prompt goes on."""
    calls = second[0]["calls"]
    stored = [*prompts.first, *plain[0][0][0][:-1]]
    assert cached(calls[1]) == [170]
    assert cached(calls[2]) == [alike(stored, prompts.longer)]
    assert tokens(calls[1]) == tokens(plain[1])
    assert tokens(calls[2]) == tokens(plain[2])


def test_a_tenant_finds_nothing_of_another(second, plain):
    answers = second[0]["calls"][4]
    assert cached(answers) == [0]
    assert tokens(answers) == tokens(plain[0])


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_transformers_goes_on_from_what_vllm_computed(model, second, prompts, plain, target):
    with kvdb.connect(target) as db, attach(model, db) as engine:
        ids = torch.tensor([prompts.longer])
        answer = engine.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, retrieval=kvdb.Exact())
        assert engine.last.reused == (len(prompts.longer) - 1,)
    assert [answer[0, len(prompts.longer) :].tolist()] == tokens(plain[2])


def test_vllm_goes_on_from_what_transformers_stored_on_a_server(vllm_run, model, prompts, plain, engine):
    """Its scheduler and its worker are processes of their own, which a folder would not serve."""
    with attach(model, Client(engine)) as attached:
        attached.store(name="prompt", input_ids=torch.tensor([prompts.first]))
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    try:
        results, log = vllm_run([[ask(prompts.longer)]], server.target, processes=True)
    finally:
        server.stop(grace=0)
    assert cached(results["calls"][0]) == [len(prompts.first)]
    assert tokens(results["calls"][0]) == tokens(plain[2])
    assert "kvdb steps aside" not in log


def test_a_load_that_fails_is_computed(vllm_run, prompts, plain, target, second):
    """It fails in the midst of its layers, beside neighbours that are loaded."""
    batch = [ask(prompts.longer), *(ask(prompt) for prompt in prompts.others)]
    results, log = vllm_run([batch], target, failing_read=41)
    assert tokens(results["calls"][0]) == tokens([*plain[2], *plain[3]])
    assert log.count("kvdb steps aside until it is back") == 1


def test_preempted_requests_answer_as_vllm_does(vllm_run, prompts, plain, target):
    crowd = [ask(prompt) | {"tokens": 120} for prompt in prompts.crowd]
    results, log = vllm_run([crowd], target, num_gpu_blocks_override=11, max_model_len=640)
    assert results["preemptions"] > 0
    assert tokens(results["calls"][0]) == tokens(plain[4])
    assert "kvdb steps aside" not in log


def test_vllm_runs_without_a_database(vllm_run, prompts, plain):
    results, log = vllm_run([[ask(prompts.first)]], "kvdb://127.0.0.1:1")
    assert tokens(results["calls"][0]) == tokens(plain[0])
    lines = [line for line in log.splitlines() if "kvdb steps aside" in line]
    assert all(re.search(r"WARNING \d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines), "in vLLM's own format"
    assert len(lines) == 2, "one of the scheduler's side, one of the worker's"


def test_requests_wait_for_their_loads_while_others_go_on(vllm_run, prompts, tmp_path):
    """With async loads, and no cache of vLLM's own: the second time a batch is loaded, beside a prompt that is computed. The next
    turn of a chat finds the answer too, which the step behind its end has copied."""
    batch = [ask(prompt) for prompt in prompts.others]
    given = {"loads": "async", "enable_prefix_caching": False}
    first, _ = vllm_run([batch, [ask(prompts.first)]], str(tmp_path), **given)
    answer = first["calls"][0][0][0]
    turn = [*prompts.others[0], *answer, *prompts.left[170:200]]
    second, log = vllm_run([[*batch, ask(prompts.longer)], [ask(turn)]], str(tmp_path), **given)
    assert tokens(second["calls"][0])[:3] == tokens(first["calls"][0])
    assert cached(second["calls"][0]) == [*(len(prompt) - 1 for prompt in prompts.others), len(prompts.first)]
    assert cached(second["calls"][1]) == [len(prompts.others[0]) + len(answer) - 1]
    assert "kvdb steps aside" not in log
    assert first["metrics"]["vllm:kvdb_save_bytes"] > 0
    assert first["metrics"]["vllm:kvdb_save_seconds"] > 0
    assert second["metrics"]["vllm:kvdb_load_bytes"] > 0
    assert second["metrics"]["vllm:kvdb_load_seconds"] > 0

    failed, log = vllm_run([batch], str(tmp_path), failing_read=41, **given)
    assert tokens(failed["calls"][0]) == tokens(first["calls"][0])
    assert log.count("kvdb steps aside until it is back") == 1


def test_a_hit_in_bfloat16_is_answered_as_one_of_vllm_itself(vllm_run, prompts, tmp_path):
    """Of the same length: a full prefill rounds otherwise than one behind a hit, in vLLM alone too."""
    text = [*prompts.longer, *prompts.others[0]]
    calls = [[ask(text[start : start + whole * BLOCK + 1])] for start, whole in ((0, 2), (100, 3), (300, 4))]
    own, _ = vllm_run([*calls, *calls], dtype="bfloat16")
    vllm_run(calls, str(tmp_path), dtype="bfloat16")
    found, log = vllm_run(calls, str(tmp_path), dtype="bfloat16")
    assert [cached(call) for call in found["calls"]] == [[2 * BLOCK], [3 * BLOCK], [4 * BLOCK]]
    assert [cached(call) for call in own["calls"][3:]] == [cached(call) for call in found["calls"]]
    assert [tokens(call) for call in found["calls"]] == [tokens(call) for call in own["calls"][3:]]
    assert "kvdb steps aside" not in log
