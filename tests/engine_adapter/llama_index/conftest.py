"""A RAG engine that chats, under the real package."""

import pytest

from engine_adapter.rag import ChatFormat, RagEngine
from kvdb.client.client import Client
from tests.engine_adapter.rag import chats


@pytest.fixture
def rag(model, engine):
    form = ChatFormat(header="[{id}] ", separator=";")
    with RagEngine(model, chats.fast(), Client(engine), chat=form, instruction="Read.", chunk_tokens=24) as made:
        yield made
