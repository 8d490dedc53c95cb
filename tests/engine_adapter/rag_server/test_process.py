"""`kvdb rag serve` as a process: its documents' commands, OpenAI's own client, SIGTERM, a restart, a neighbour."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx2 as httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvdb
from engine_adapter.rag import RagEngine
from kvdb.__main__ import main
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.architecture.source import ROOT
from tests.engine_adapter.rag import chats
from tests.engine_adapter.tiny import build

SAID = [{"role": "user", "content": "Who signed?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    build().save_pretrained(path)
    chats.fresh().save_pretrained(path)
    return path


@contextmanager
def serving(folder, store, *flags):
    command = [
        sys.executable,
        "-m",
        "kvdb",
        "rag",
        "serve",
        "--model",
        str(folder),
        "--target",
        str(store),
        "--port",
        "0",
        *flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        told = []

        def stop():
            if not told:  # a second signal ends it at once
                told.append(process.send_signal(signal.SIGTERM))

        try:
            line = process.stdout.readline()
            assert " answers on http://127.0.0.1:" in line
            yield line.split()[-1], stop
        finally:
            stop()
            status = process.wait(30)
        assert status == 0


def test_the_documents_commands_openais_client_and_a_restart(folder, tmp_path):
    import openai

    text = (ROOT / "docs/rag-serve.md").read_text()
    commands = re.findall(r"^curl .*", text, re.MULTILINE)
    assert len(commands) == 5
    with serving(folder, tmp_path / "store", "--grace-seconds", "0") as (url, stop):
        replies = [_request(command, url) for command in commands]
        assert [reply.status_code for reply in replies] == [200] * 5
        assert replies[1].json()["data"][0]["id"] == "contract"
        assert replies[2].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert replies[3].text.endswith("data: [DONE]\n\n")
        asked = {"model": "model", "messages": SAID, "temperature": 0, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=asked, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            stop()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping", "it is cut, and the client is told"

    with (
        kvdb.connect(tmp_path / "store") as db,
        server_over(db) as target,
        serving(folder, target, "--name", "letters") as (url, stop),
        openai.OpenAI(base_url=url, api_key="none") as client,
    ):
        add_in_this_process(folder, target, "letter", "Eve did not sign.")
        asked = {"model": "model", "messages": SAID, "temperature": 0, "extra_body": {"documents": ["annex"]}}
        whole = client.chat.completions.create(**asked, max_tokens=16)
        assert whole.usage.prompt_tokens_details.cached_tokens > len("Bob did too.")
        chunks = [*client.chat.completions.create(**asked, max_tokens=16, stream=True, stream_options={"include_usage": True})]
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        nothing = {"n": 1, "tools": [], "tool_choice": "none", "logit_bias": {}, "reasoning_effort": "low", "store": False}
        assert client.chat.completions.create(**asked, **nothing, max_tokens=16).choices == whole.choices
        with pytest.raises(openai.BadRequestError, match="not served by kvdb"):
            client.chat.completions.create(**asked, n=2)
        with pytest.raises(openai.NotFoundError, match="--name"):
            client.chat.completions.create(**{**asked, "model": "gpt-4o"})
        with pytest.raises(openai.NotFoundError, match="contract"):
            client.chat.completions.create(**{**asked, "extra_body": {"documents": ["contract"]}})

        letter = client.chat.completions.create(**{**asked, "extra_body": {"documents": ["letter"]}}, max_tokens=2)
        assert letter.usage.prompt_tokens_details.cached_tokens > len("Eve did not sign."), "another process stored it"

        stream = iter(client.chat.completions.create(**asked, max_tokens=24, stream=True))
        next(stream)
        stop()
        rest = [*stream]
        assert rest[-1].choices[0].finish_reason == "length", "an answer under way may end within the time of grace"


def test_others_may_not_reach_it_without_a_token(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVDB_RAG_TOKEN", raising=False)
    flags = ["rag", "serve", "--model", str(folder), "--target", str(tmp_path / "store")]
    assert main([*flags, "--host", "0.0.0.0", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "KVDB_RAG_TOKEN" in said
    empty = tmp_path / "token"
    empty.write_text("\n")
    assert main([*flags, "--token-file", str(empty)]) == 2
    assert "empty" in capsys.readouterr().err


@contextmanager
def server_over(db):
    server = Server(db._transport, ServerConfig(port=0))
    server.start()
    try:
        yield server.target
    finally:
        server.stop(grace=0)


def add_in_this_process(folder, target, name, text):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with kvdb.connect(target) as client, RagEngine(model, tokenizer, client, chat=True) as engine:
        engine.add(name, text)


def _request(command, url):
    """The request that a curl command makes, at this server."""
    words = shlex.split(command)
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if "-d" in words else "GET"
    body = words[words.index("-d") + 1] if "-d" in words else None
    (address,) = (word for word in words if word.startswith("http"))
    path = address.partition("/v1")[2]
    return httpx.request(method, url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)
