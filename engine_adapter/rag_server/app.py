"""The endpoint over a RAG engine, as an ASGI application."""

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Event
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import StoppingCriteriaList

from engine_adapter.rag import Answer, DocumentInfo, RagEngine
from engine_adapter.rag_server.completion import Completion, Receive, Scope, Send
from engine_adapter.rag_server.errors import Failure, Refused, failure_of, invalid
from engine_adapter.rag_server.requests import ChatRequest, DocumentRequest, Given
from engine_adapter.rag_server.settings import EndpointSettings
from engine_adapter.rag_server.work import CallQueue, Generation
from engine_adapter.transformers.timing import StopWhen
from kvdb.errors import KvdbError

OPEN = frozenset({"/health"})
"""What is answered without a token."""
CLIENT_LEFT = 499
DOCUMENT_THREADS = 4
G = TypeVar("G", bound=Given)


class Endpoint:
    """The routes over an engine that chats, which the caller keeps."""

    def __init__(self, engine: RagEngine, settings: EndpointSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._answers = CallQueue(1, settings.waiting_max, "kvdb-rag-answer")
        self._documents = CallQueue(DOCUMENT_THREADS, settings.waiting_max, "kvdb-rag-document")
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The application."""
        documents = "/v1/documents"
        token = self._settings.token
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route(documents, self._list),
                Route(documents + "/{doc_id:path}", self._describe, methods=["GET"]),
                Route(documents + "/{doc_id:path}", self._put, methods=["PUT"]),
                Route(documents + "/{doc_id:path}", self._delete, methods=["DELETE"]),
            ],
            middleware=[Middleware(BearerCheck, token=token)] if token else [],
            exception_handlers={
                KvdbError: lambda _, error: _failed(failure_of(error)),
                HTTPException: lambda _, error: _failed(_of_http(error)),
                ClientDisconnect: lambda *_: Response(status_code=CLIENT_LEFT),
                Exception: lambda *_: _failed(Failure(500, "the server failed; its log says why", "server_error", "internal")),
            },
        )

    def cut(self) -> None:
        """Refuse what comes, and have answers end at their next token."""
        self._answers.cut()
        self._documents.cut()

    def close(self) -> None:
        """Wait for what runs."""
        self.cut()
        self._answers.close()
        self._documents.close()

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described_model]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described_model)

    async def _complete(self, request: Request) -> Completion:
        asked = await self._body(request, ChatRequest)
        self._check_model(asked.model)
        new_tokens = asked.new_tokens or self._settings.new_tokens
        if new_tokens > self._engine.positions:
            said = f"max_tokens is {new_tokens}; the model has {self._engine.positions} positions for the prompt and its answer"
            raise Refused(Failure(400, said, "invalid_request_error", "context_length_exceeded", "max_tokens"))
        generation = Generation(self._answers, lambda give, stop: self._ask(asked, new_tokens, give, stop))
        return Completion(generation, asked, lambda answer: self._finish(answer, new_tokens))

    def _ask(self, asked: ChatRequest, new_tokens: int, give: Callable[[str], object], stop: Event) -> Answer:
        if asked.seed is not None:
            torch.manual_seed(asked.seed)
        positions = self._engine.positions  # transformers' own limit would take the place of max_new_tokens
        ends = [StopWhen(lambda _: stop.is_set()), StopWhen(lambda ids: ids.shape[1] >= positions)]
        try:
            return self._engine.chat(
                asked.chat,
                asked.docs,
                recompute=asked.recompute,
                max_new_tokens=new_tokens,
                stream=give,
                stopping_criteria=StoppingCriteriaList(ends),
                **asked.sampling,
            )
        finally:
            if asked.seed is not None:
                torch.seed()

    def _finish(self, answer: Answer, new_tokens: int) -> str:
        full = len(answer.tokens) >= new_tokens or answer.usage.prompt + len(answer.tokens) >= self._engine.positions
        return "length" if full and answer.tokens[-1] not in self._engine.ends else "stop"

    async def _list(self, _: Request) -> Response:
        infos = await self._documents.call(self._engine.documents)
        return JSONResponse({"object": "list", "data": [_described(info) for info in infos]})

    async def _describe(self, request: Request) -> Response:
        doc_id = request.path_params["doc_id"]
        return JSONResponse(_described(await self._documents.call(lambda: self._engine.document(doc_id))))

    async def _put(self, request: Request) -> Response:
        doc_id = request.path_params["doc_id"]
        given = await self._body(request, DocumentRequest)
        kept: dict[str, Any] = {"ttl": given.ttl, "pin": given.pinned, "metadata": given.metadata}
        info = await self._documents.call(lambda: self._engine.upsert(doc_id, given.text, **kept))
        return JSONResponse(_described(info))

    async def _delete(self, request: Request) -> Response:
        doc_id = request.path_params["doc_id"]
        await self._documents.call(lambda: self._engine.delete(doc_id))
        return JSONResponse({"id": doc_id, "object": "document", "deleted": True})

    @property
    def _described_model(self) -> dict[str, Any]:
        return {"id": self._settings.model, "object": "model", "created": self._started, "owned_by": "kvdb"}

    def _check_model(self, name: str) -> None:
        names = dict.fromkeys(known for known in (self._settings.model, self._settings.alias) if known)
        if name not in names:
            known = " or ".join(map(repr, names))
            said = f"there is no model {name!r}; this server has {known}, and kvdb rag serve --name gives it another name"
            raise Refused(Failure(404, said, "invalid_request_error", "model_not_found", "model"))

    async def _body(self, request: Request, form: type[G]) -> G:
        """The body, whole and checked. Raises Refused."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._settings.body_bytes_max:
                        said = f"the body has more than {self._settings.body_bytes_max:,} bytes"
                        raise Refused(Failure(413, said, "invalid_request_error", "too_large"))
        except TimeoutError:
            said = f"the body was not there within {self._settings.body_seconds:g} s"
            raise Refused(Failure(408, said, "invalid_request_error", "timeout")) from None
        try:
            return form.model_validate_json(bytes(body))
        except ValidationError as error:
            raise invalid(error) from None


class BearerCheck:
    """ASGI middleware that wants a bearer token, and compares it in constant time."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any], token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                said = "the server wants a token that this is not; send Authorization: Bearer TOKEN"
                await _failed(Failure(401, said, "invalid_request_error", "invalid_api_key"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _described(info: DocumentInfo) -> Mapping[str, Any]:
    return {"object": "document", **asdict(info)}


def _of_http(error: HTTPException) -> Failure:
    return Failure(
        error.status_code, f"{error.detail}: see /v1/models, /v1/chat/completions, /v1/documents", "invalid_request_error"
    )


def _failed(failure: Failure) -> Response:
    content = json.dumps(failure.body).encode()
    return Response(content, failure.status, media_type="application/json")
