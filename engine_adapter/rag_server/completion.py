"""A chat completion as ASGI sends it: one JSON object, or a stream of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from engine_adapter.rag import Answer, Usage
from engine_adapter.rag_server.errors import failure_of
from engine_adapter.rag_server.requests import ChatRequest
from engine_adapter.rag_server.work import Generation
from kvdb.errors import KvdbError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Finish = Callable[[Answer], str]
"""Says why an answer ended: "stop" or "length"."""


class StopText:
    """Hands on a text up to the first of some sequences, no part of which comes out.

    found: whether one of them has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What can be handed on now; the rest may be the beginning of a sequence."""
        text = self._held + piece
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if begins:
            self.found, self._held = True, ""
            return text[: min(begins)]
        kept = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class Completion:
    """A response that ends its answer when the client goes away. Whatever goes wrong before the first text has its own status."""

    def __init__(self, generation: Generation, request: ChatRequest, finish: Finish) -> None:
        self._generation = generation
        self._request = request
        self._finish = finish
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": request.model}
        self._stops = StopText(request.stops)
        self._answer: Answer | None = None

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        reply = asyncio.ensure_future(self._stream(send) if self._request.stream else self._whole(send))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({reply, left}, return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                reply.result()
        finally:
            self._generation.end()
            for task in (reply, left):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError, KvdbError):
                    await task

    async def _whole(self, send: Send) -> None:
        text = "".join([text async for text in self._texts()])
        answer = self._whole_answer
        choice = {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}
        said = {
            **self._head,
            "object": "chat.completion",
            "choices": [{**choice, "finish_reason": self._reason(answer)}],
            "usage": usage_of(answer.usage),
        }
        await _start(send, "application/json")
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async def _stream(self, send: Send) -> None:
        texts = self._texts()
        first = await anext(texts, None)
        await _start(send, "text/event-stream; charset=utf-8")
        try:
            await self._event(send, {"role": "assistant", "content": ""})
            if first is not None:
                await self._event(send, {"content": first})
                async for text in texts:
                    await self._event(send, {"content": text})
            answer = self._whole_answer
            await self._event(send, {}, self._reason(answer))
            if self._request.wants_usage:
                await _send(send, {**self._chunk, "choices": [], "usage": usage_of(answer.usage)})
            await _data(send, "[DONE]")
        except KvdbError as error:
            await _send(send, failure_of(error).body)
        await send({"type": "http.response.body", "body": b""})

    async def _texts(self) -> AsyncIterator[str]:
        """The text up to a stop sequence; afterwards the answer is there."""
        async for piece in self._generation.pieces():
            if text := self._stops.add(piece):
                yield text
            if self._stops.found:
                self._generation.end()
                break
        self._answer = await self._generation.answer()
        if text := self._stops.rest():
            yield text

    @property
    def _whole_answer(self) -> Answer:
        assert self._answer is not None, "it is there once all of its text is"
        return self._answer

    @property
    def _chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _reason(self, answer: Answer) -> str:
        return "stop" if self._stops.found else self._finish(answer)

    async def _event(self, send: Send, delta: Mapping[str, str], reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._request.wants_usage else {}
        await _send(send, {**self._chunk, "choices": [choice], **usage})


def usage_of(usage: Usage) -> dict[str, Any]:
    """What an answer took, in OpenAI's words. cached_tokens: those whose stored KV was taken as it is."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }


async def _left(receive: Receive) -> None:
    """Returns when the client has gone away. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send(send: Send, said: Mapping[str, Any]) -> None:
    await _data(send, json.dumps(said))


async def _data(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a sequence."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
