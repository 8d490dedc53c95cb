"""Chat completions as OpenAI's clients ask for them; the oracle is the engine itself."""

import json
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_adapter.rag_server.conftest import MODEL
from tests.waiting import until

SAID = [{"role": "user", "content": "why?"}]
DOC = {"id": "a/b c", "text": "some text of words, and more of it"}


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks):
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def test_an_answer_is_the_engines_and_counts_what_was_stored(ask, rag):
    rag.upsert("a", "some text of words")
    told = rag.chat(SAID, ["a"], max_new_tokens=8, do_sample=False, recompute=0.0)
    reply = ask(documents=["a"], recompute=0).json()
    assert reply["choices"][0]["message"]["content"] == told.text
    assert reply["usage"]["prompt_tokens"] == told.usage.prompt
    assert reply["usage"]["completion_tokens"] == told.usage.generated
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == told.usage.reused > len("some text of words")
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_the_same_text_and_its_usage_where_it_is_wanted(ask):
    whole = ask(documents=[DOC]).json()
    chunks = events(ask(documents=[DOC["id"]], stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert "usage" not in events(ask(stream=True))[-1]


def test_a_stop_sequence_ends_the_text_before_it(ask):
    whole = ask(max_tokens=12).json()["choices"][0]["message"]["content"]
    stop = whole[3:6]
    before = whole[: whole.index(stop)]
    reply = ask(max_tokens=12, stop=stop).json()
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == (before, "stop")
    assert reply["usage"]["completion_tokens"] <= len(whole)
    assert text_of(events(ask(max_tokens=12, stop=[stop, "\x01"], stream=True))) == before


def test_a_seed_makes_sampling_the_same(ask):
    texts = {ask(seed=5, temperature=1.5, top_p=0.9, max_tokens=16).json()["choices"][0]["message"]["content"] for _ in range(2)}
    assert len(texts) == 1
    others = {ask(seed=seed, temperature=1.5, max_tokens=16).json()["choices"][0]["message"]["content"] for seed in range(4)}
    assert len(others) > 1


def test_the_last_token_of_a_turn_is_a_stop(ask, rag, monkeypatch):
    told = rag.chat(SAID, max_new_tokens=8, do_sample=False)
    monkeypatch.setattr(rag._attached.model.generation_config, "eos_token_id", told.tokens[3])
    assert told.tokens[3] in rag.ends
    assert ask(max_tokens=4).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        ({"documents": ["nobody"]}, 404, "not_found"),
        ({"documents": ["nobody"], "stream": True}, 404, "not_found"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"temperature": 3}, 400, "invalid_value"),
        ({"top_p": 0}, 400, "invalid_value"),
        ({"n": 2}, 400, "unsupported"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported"),
        ({"max_tokens": 0}, 400, "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value"),
        ({"stop": ["a"] * 5}, 400, "invalid_value"),
        ({"unknown": 1}, 400, "unsupported"),
        ({"messages": []}, 400, "invalid_value"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_value"),
        ({"documents": [{}]}, 400, "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value"),
        ({"max_tokens": 10**6}, 400, "context_length_exceeded"),
    ],
)
def test_what_is_wrong_has_its_status_and_openais_form(ask, given, status, code):
    reply = ask(**given)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


HARMLESS = {
    "logit_bias": {}, "tool_choice": "none", "tools": [], "parallel_tool_calls": True, "service_tier": "auto", "n": 1,
    "reasoning_effort": "low", "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "top_logprobs": 0,
    "response_format": {"type": "text"}, "store": True, "metadata": {"a": "b"}, "user": "me", "seed": 3, "verbosity": "low",
    "modalities": ["text"], "safety_identifier": "me", "prompt_cache_key": "a", "prompt_cache_retention": "24h",
    "functions": [], "function_call": "none", "audio": None, "prediction": None, "stop": None,
}  # fmt: skip
"""Fields that OpenAI's clients send, with values that ask for nothing that kvdb does not do."""


def test_fields_that_ask_for_nothing_change_nothing(ask):
    plain = ask().json()["choices"]
    for name, value in HARMLESS.items():
        reply = ask(**{name: value})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == plain, name
    assert ask(**HARMLESS).json()["choices"] == plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not served by kvdb; leave it out, or send []"),
        ({"tool_choice": "required"}, 'tool_choice is not served by kvdb; leave it out, or send "none"'),
        ({"logit_bias": {"5": 1}}, "logit_bias is not served by kvdb; leave it out, or send {}"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not served by kvdb; leave it out, or send 0"),
        ({"response_format": {"type": "json_object"}}, 'response_format is .* or send {"type": "text"}'),
        ({"audio": {"voice": "alloy"}}, "audio is not served by kvdb; leave it out"),
        ({"top_k": 4}, "top_k is not served by kvdb; leave it out"),
    ],
)
def test_what_is_not_served_is_said_in_a_sentence(ask, given, said):
    reply = ask(**given)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported", next(iter(given)))
    assert re.fullmatch(said.replace("[]", r"\[\]"), error["message"])


def test_a_model_has_the_name_of_its_folder_and_its_own(offer):
    _, client = offer(alias="folder")
    asked = {"messages": SAID, "max_tokens": 1}
    for name in (MODEL, "folder"):
        assert client.post("/v1/chat/completions", json={"model": name, **asked}).json()["model"] == name
        assert client.get(f"/v1/models/{name}").status_code == 200
    reply = client.post("/v1/chat/completions", json={"model": "gpt-4o", **asked})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny' or 'folder', and kvdb rag serve --name" in reply.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(offer):
    _, client = offer(body_bytes_max=100)
    reply = client.put("/v1/documents/a", content=b"x" * 101)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("model", "messages", "documents", "temperature", "top_p", "stop", "seed", "stream", "stream_options", "recompute", "n")
MESSAGES = st.lists(st.fixed_dictionaries({"role": JSON | st.just("user"), "content": JSON}), max_size=3)


@given(
    wrong=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3), messages=MESSAGES, raw=st.binary(max_size=20)
)
def test_no_body_is_an_error_of_the_server(client, wrong, messages, raw):
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 1}
    bodies = [json.dumps(body).encode() for body in ({**asked, **wrong}, {**asked, "messages": messages}, wrong)]
    for body in (*bodies, raw):
        assert client.post("/v1/chat/completions", content=body).status_code < 500
        assert client.put("/v1/documents/x", content=body).status_code < 500


def test_what_waits_is_bounded_and_a_cut_ends_answers_at_their_next_token(offer, rag, monkeypatch):
    endpoint, client = offer(waiting_max=1)
    told, go = threading.Event(), threading.Event()
    chat = type(rag).chat

    def held(self, *given, stream, **options):
        def give(piece):
            told.set()
            assert go.wait(20)
            stream(piece)

        return chat(self, *given, stream=give, **options)

    monkeypatch.setattr(type(rag), "chat", held)
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 60}
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(client.post("/v1/chat/completions", json=asked))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert told.wait(20)
    until(lambda: len(endpoint._answers._open) == 2)
    busy = client.post("/v1/chat/completions", json=asked)
    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "busy")
    endpoint.cut()
    go.set()
    for thread in threads:
        thread.join(20)
    assert [reply.json()["error"]["code"] for reply in replies] == ["stopping", "stopping"]
    assert client.post("/v1/chat/completions", json=asked).status_code == 503


def test_a_token_is_wanted_but_for_health(offer):
    _, client = offer(token="secret")
    assert client.get("/health").status_code == 200
    for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
        reply = client.get("/v1/models", headers=header)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"] == MODEL
