"""A RAG engine over a tiny model."""

import random

import pytest

from engine_adapter.rag import RagEngine
from kvdb.client.client import Client
from tests.engine_adapter.rag.characters import Characters

CHUNK = 24


@pytest.fixture
def make_rag(model, engine):
    """A RAG engine on the test's database. Only one at a time, for it attaches the model."""
    made = []

    def make(**settings):
        made.append(RagEngine(model, Characters(), Client(engine), **{"chunk_tokens": CHUNK, **settings}))
        return made[-1]

    yield make
    for rag in made:
        rag.close()


@pytest.fixture
def rag(make_rag):
    return make_rag()


@pytest.fixture
def names(engine):
    """The names of everything that the database holds."""
    return lambda: [info.name for info in engine.contexts()]


def text(tokens, seed=0):
    """Words by chance, so many characters of them."""
    chance = random.Random(seed)
    words = ("".join(chance.choices("abcdefgh", k=chance.randint(1, 7))) for _ in range(tokens))
    return " ".join(words)[:tokens]


@pytest.fixture
def write():
    return text
