"""A client that goes away ends its answer; the endpoint is called as ASGI servers call it."""

import asyncio
import json

from engine_adapter.rag_server.app import Endpoint
from engine_adapter.rag_server.settings import EndpointSettings
from tests.engine_adapter.rag_server.conftest import MODEL
from tests.waiting import until

TOKENS = 900
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


async def asked_and_left(endpoint, after, **given):
    """Everything that the client was sent that left after so many messages."""
    said = {"model": MODEL, "messages": [{"role": "user", "content": "why?"}], "temperature": 0, "max_tokens": TOKENS, **given}
    bodies = [{"type": "http.request", "body": json.dumps(said).encode(), "more_body": False}]
    left = asyncio.Event()
    sent = []

    async def receive():
        if bodies:
            return bodies.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) >= after:
            left.set()

    if not after:
        left.set()
    await asyncio.wait_for(endpoint.app()(dict(SCOPE), receive, send), 30)
    return sent


def test_an_answer_ends_at_the_next_token_and_the_model_is_free(rag, monkeypatch):
    generated = []
    chat = type(rag).chat

    def counted(self, *given, **options):
        answer = chat(self, *given, **options)
        generated.append(len(answer.tokens))
        return answer

    monkeypatch.setattr(type(rag), "chat", counted)
    endpoint = Endpoint(rag, EndpointSettings(MODEL))
    try:
        sent = asyncio.run(asked_and_left(endpoint, 3, stream=True))
        assert len(sent) < TOKENS
        asyncio.run(asked_and_left(endpoint, 0))
        until(lambda: not endpoint._answers._open, "an answer that nobody waits for goes on")
        assert max(generated) < TOKENS
        whole = asyncio.run(asked_and_left(endpoint, 10, max_tokens=4))
        assert json.loads(whole[-1]["body"])["usage"]["completion_tokens"] == 4
    finally:
        endpoint.close()
