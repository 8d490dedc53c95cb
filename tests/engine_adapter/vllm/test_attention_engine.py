"""vLLM itself with its attention answered by kvdb: its tokens are those of vLLM alone. `make vllm-test` runs these."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

import kvdb
from kvdb.__main__ import main
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.engine_adapter.vllm.conftest import MODEL, documents
from tests.waiting import until

NEW_TOKENS = 12
LAYERS = 30
EXACT = {"from_tokens": 256, "retrieval": "exact"}


def ask(prompt, **fields):
    return {"prompt": prompt, "tokens": NEW_TOKENS} | fields


@pytest.fixture(scope="module")
def prompts(vllm_run):
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(documents()).ids
    return SimpleNamespace(
        first=text[:420],
        twin=[*text[:400], *text[900:1000]],
        short=text[2000:2100],
        other=text[3000:3310],
        crowd=[text[5000 + 400 * i : 5300 + 400 * i] for i in range(3)],
    )


@pytest.fixture(scope="module")
def plain(vllm_run, prompts):
    batch = [ask(prompts.first), ask(prompts.short), ask(prompts.twin)]
    return vllm_run([[ask(prompts.first)], batch], enable_prefix_caching=False)[0]["calls"]


def tokens(answers):
    return [answer[0] for answer in answers if answer]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kvdb") / "store")


@pytest.fixture(scope="module")
def first(vllm_run, prompts, target):
    """A batch of two long requests, which share blocks, around a short one, and one that is cancelled while it decodes."""
    batch = [ask(prompts.first), ask(prompts.short), ask(prompts.twin), ask(prompts.other, cancel=6)]
    return vllm_run([batch, [ask(prompts.first)]], target, attention=EXACT)


def test_a_batch_in_which_kvdb_answers_the_long_requests_has_the_tokens_of_vllm(first, plain):
    results, log = first
    assert tokens(results["calls"][0]) == tokens(plain[1])
    assert results["calls"][0][3] is None
    assert tokens(results["calls"][1]) == tokens(plain[0])
    assert "kvdb steps aside" not in log
    assert results["answered"] > 2 * LAYERS * NEW_TOKENS, "of the 11 decode steps of 3 requests, and 5 of another"
    assert results["retrievals"] == ["exact"]


def test_a_database_that_goes_in_the_midst_of_a_step_changes_nothing(vllm_run, prompts, target, first, plain):
    batch = [ask(prompts.first), ask(prompts.short), ask(prompts.twin)]
    results, log = vllm_run([batch], target, attention=EXACT, gone_at=4 * LAYERS + 11)
    assert tokens(results["calls"][0]) == tokens(plain[1])
    assert results["answered"] > LAYERS
    assert log.count("kvdb steps aside until it is back") == 1


def test_dipr_answers_and_its_plans_say_so(vllm_run, prompts, target, first):
    results, log = vllm_run([[ask(prompts.first)]], target, attention={"from_tokens": 256, "retrieval": {"dipr": 0.012}})
    assert len(results["calls"][0][0][0]) == NEW_TOKENS
    assert results["answered"] > LAYERS * NEW_TOKENS // 2
    assert results["retrievals"] == ["dipr(0.012)"]
    assert "kvdb steps aside" not in log


def test_an_error_budget_is_kept_by_the_optimizer(vllm_run, prompts, target, first):
    results, log = vllm_run([[ask(prompts.first)]], target, attention={"from_tokens": 256, "error_max": 0.05})
    assert len(results["calls"][0][0][0]) == NEW_TOKENS
    assert results["answered"] > LAYERS * NEW_TOKENS // 2
    assert "kvdb steps aside" not in log


def test_preempted_requests_that_kvdb_answers_have_the_tokens_of_vllm(vllm_run, prompts, target, first):
    crowd = [ask(prompt) | {"tokens": 120} for prompt in prompts.crowd]
    plain = vllm_run([crowd], enable_prefix_caching=False)[0]["calls"][0]
    results, log = vllm_run([crowd], target, attention=EXACT, num_gpu_blocks_override=11, max_model_len=640)
    assert results["preemptions"] > 0
    assert tokens(results["calls"][0]) == tokens(plain)
    assert "kvdb steps aside" not in log


def test_a_version_that_is_not_known_is_left_alone(vllm_run, prompts, target, first, plain):
    results, log = vllm_run([[ask(prompts.first)]], target, attention=EXACT, version="0.99.0")
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert results["answered"] == 0
    assert "kvdb steps aside: vLLM answers all attention itself" in log


def test_without_its_plugin_kvdb_says_so(vllm_run, prompts, target, first, plain):
    results, log = vllm_run([[ask(prompts.first)]], target, attention=EXACT, plugin=False)
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert results["answered"] == 0
    assert "plugin is not loaded" in log


def test_the_plugin_does_nothing_that_is_not_configured(vllm_run, prompts, target, first, plain):
    results, log = vllm_run([[ask(prompts.first)]], target)
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert results["answered"] == 0
    assert results["implementations"] == ["CPUAttentionBackendImpl"]
    assert "kvdb steps aside" not in log


def test_a_running_request_is_explained_on_a_server(vllm_run, prompts, plain, engine, capsys):
    """The scheduler and the worker are processes of their own."""
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    try:
        with kvdb.connect(server.target) as db, ThreadPoolExecutor(1) as thread:
            asked = [[ask(prompts.first)], [ask(prompts.first, tokens=200)]]
            running = thread.submit(vllm_run, asked, server.target, processes=True, attention=EXACT)
            until(lambda: running.done() or db.sessions(), seconds_max=250)
            told = db.sessions()
            assert main(["explain", "--session", told[0].label, "--json", "--server", server.target]) == 0
            plans = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            results, log = running.result()
    finally:
        server.stop(grace=0)
    assert told[0].label.startswith("0-0")
    assert told[0].reused == len(prompts.first)
    assert len(plans) == LAYERS
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert "kvdb steps aside" not in log
