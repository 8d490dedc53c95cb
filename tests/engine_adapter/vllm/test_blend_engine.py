"""Prompts laid out from documents in vLLM itself, with SmolLM2 on the CPU. `make vllm-test` runs these."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer

import kvdb
from engine_adapter.transformers import attach
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.engine_adapter.vllm.conftest import MODEL, documents

NEW_TOKENS = 12
OPEN, CLOSE = [11, 7, 11], [11, 8, 11]
BLEND = {"open": OPEN, "close": CLOSE, "recompute": 0.3}


def ask(prompt, **fields):
    return {"prompt": prompt, "tokens": NEW_TOKENS, **fields}


def marked(spans, ratio):
    return {"kvdb_parts": spans, "kvdb_recompute": ratio}


def tokens(answers):
    return [answer[0] for answer in answers]


def cached(answers):
    return [answer[1] for answer in answers]


@pytest.fixture(scope="module")
def prompts(vllm_run):
    """Two documents and what stands around them; the second prompt has them the other way round, with marks."""
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(documents()).ids
    system, one, two, question = text[:20], text[500:680], text[1500:1650], text[3000:3030]
    whole = [*system, *one, *two, *question]
    return SimpleNamespace(
        parts=(system, one, two, question),
        whole=whole,
        spans=[[20, 200], [200, 350]],
        turned=[*system, *OPEN, *two, *CLOSE, *OPEN, *one, *CLOSE, *question],
        open=[*system, *OPEN, *two, *question],
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kvdb") / "store")


@pytest.fixture(scope="module")
def plain(vllm_run, prompts):
    return vllm_run([[ask(prompts.whole)], [ask(prompts.turned)], [ask(prompts.open)]], enable_prefix_caching=False)[0]["calls"]


@pytest.fixture(scope="module")
def blended(vllm_run, prompts, target):
    """A prompt at several ratios, one with marks in it, one without, marks that do not close, or are nowhere, and a salt."""
    given = [marked(prompts.spans, ratio) for ratio in (1.0, 0.3, 0.0)]
    calls = [[ask(prompts.whole, extra=extra)] for extra in given]
    calls += [[ask(prompts.turned)], [ask(prompts.whole)], [ask(prompts.open)]]
    calls += [[ask(prompts.whole, extra=marked([[20, 999]], 1.0)), ask(prompts.whole, extra=given[0], salt="tenant")]]
    return vllm_run(calls, target, blend=BLEND)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_all_of_it_is_what_vllm_computes(blended, plain, prompts):
    results = blended[0]
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert results["blends"][0] == [
        {"reused": 0, "recomputed": 330, "fresh": 20, "stored": 330, "ratio": 1.0, "laid_out": 350, "tail": 30}
    ]


@pytest.mark.parametrize(("call", "ratio"), [(1, 0.3), (2, 0.0)])
def test_it_answers_as_transformers_with_the_same_documents(blended, prompts, model, call, ratio):
    """Same documents, same ratio, same numbers of tokens; nothing is stored again."""
    system, one, two, question = map(torch.tensor, prompts.parts)
    with kvdb.connect() as db, attach(model, db) as engine:
        parts = [system, *(engine.store_chunk(name=f"{i}", input_ids=ids) for i, ids in enumerate((one, two))), question]
        answer = engine.generate(parts=parts, recompute=ratio, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
        blend = engine.last.blend
    assert tokens(blended[0]["calls"][call]) == [answer[0, len(prompts.whole) :].tolist()]
    result = blended[0]["blends"][call][0]
    assert (result["reused"], result["recomputed"], result["fresh"]) == (
        round(blend.reused),
        round(blend.recomputed),
        blend.fresh,
    )
    assert result["stored"] == 0


def test_a_prompt_without_marks_reads_nothing_that_was_blended(blended, plain):
    assert cached(blended[0]["calls"][0]) == [350]
    assert cached(blended[0]["calls"][4]) == [0], "neither vLLM's cache nor kvdb has it"
    assert tokens(blended[0]["calls"][4]) == tokens(plain[0])


def test_marks_in_the_prompt_are_found(blended, prompts):
    result = blended[0]["blends"][3][0]
    assert result["stored"] == 0
    assert result["fresh"] == 20 + 2 * len(OPEN) + len(CLOSE)
    assert result["reused"] + result["recomputed"] == 330
    assert result["recomputed"] == pytest.approx(0.3 * 330, abs=1)


def test_marks_that_do_not_close_leave_the_prompt_to_vllm(blended, plain):
    assert tokens(blended[0]["calls"][5]) == tokens(plain[2])
    assert "does not close" in blended[0]["blends"][5][0]["refused"]
    assert "does not close" in blended[1]


def test_parts_outside_the_prompt_leave_it_to_vllm(blended, plain):
    assert tokens(blended[0]["calls"][6])[:1] == tokens(plain[0])
    assert "999" in blended[0]["blends"][6][0]["refused"]


def test_a_tenant_has_documents_of_its_own(blended, plain):
    assert tokens(blended[0]["calls"][6])[1:] == tokens(plain[0])
    assert blended[0]["blends"][6][1]["stored"] == 330


def test_a_database_that_goes_in_the_midst_leaves_the_prompt_to_vllm(vllm_run, prompts, plain, blended, target):
    """It fails in the midst of what is put into vLLM's blocks, which vLLM computes anew."""
    results, log = vllm_run([[ask(prompts.whole, extra=marked(prompts.spans, 0.3))]], target, blend=BLEND, failing_read=11)
    assert tokens(results["calls"][0]) == tokens(plain[0])
    assert results["blends"][0] == [{"refused": "the server went"}]
    assert "is computed as one text" in log


def test_on_a_server_and_in_processes_of_its_own(vllm_run, prompts, engine, blended):
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    given = {"kv_transfer_params": marked(prompts.spans, 0.3)}  # as the HTTP endpoint passes it on
    try:
        results, log = vllm_run([[ask(prompts.whole, extra=given)]], server.target, processes=True, blend={})
    finally:
        server.stop(grace=0)
    assert tokens(results["calls"][0]) == tokens(blended[0]["calls"][1])
    assert results["blends"][0][0]["stored"] == 330
    assert "kvdb steps aside" not in log
