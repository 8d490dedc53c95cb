"""The endpoint over a tiny model."""

import pytest
from starlette.testclient import TestClient

from engine_adapter.rag import ChatFormat, RagEngine
from engine_adapter.rag_server.app import Endpoint
from engine_adapter.rag_server.settings import EndpointSettings
from kvdb.client.client import Client
from tests.engine_adapter.rag import chats

MODEL = "tiny"


@pytest.fixture
def rag(model, engine):
    form = ChatFormat(header="[{id}] ", separator=";")
    with RagEngine(model, chats.fast(), Client(engine), chat=form, instruction="Read.", chunk_tokens=24) as made:
        yield made


@pytest.fixture
def offer(rag):
    """A client of an endpoint with these settings."""
    opened = []

    def make(**settings):
        endpoint = Endpoint(rag, EndpointSettings(MODEL, **{"new_tokens": 8, **settings}))
        client = TestClient(endpoint.app(), raise_server_exceptions=False)
        client.__enter__()
        opened.append((endpoint, client))
        return endpoint, client

    yield make
    for endpoint, client in opened:
        endpoint.close()
        client.__exit__(None, None, None)


@pytest.fixture
def client(offer):
    return offer()[1]


@pytest.fixture
def ask(client):
    def post(**given):
        said = {"model": MODEL, "messages": [{"role": "user", "content": "why?"}], "temperature": 0, **given}
        return client.post("/v1/chat/completions", json=said)

    return post
