"""A tiny model, attached to an embedded and to a remote database."""

import pytest

from engine_adapter.models import sections, vault
from engine_adapter.transformers import attach
from tests.engine_adapter.tiny import build


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Everywhere here."""


@pytest.fixture(scope="session")
def model():
    """One that nothing changes."""
    return build()


@pytest.fixture(scope="session")
def vault_model():
    """The model and the tokenizer of the demo."""
    return vault.load()


@pytest.fixture(scope="session")
def sections_model():
    """The model and the tokenizer of the RAG demo."""
    return sections.load()


@pytest.fixture
def attached(model, db):
    """The model, attached to an embedded and to a remote database."""
    with attach(model, db, piece_tokens=16) as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_session_left(request):
    """Every session that was opened in a test is closed at its end, whatever happened in it."""
    database = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield
    assert database is None or not database.handles


@pytest.fixture
def names(db):
    """The names of what is stored now."""
    return lambda: [context.name for context in db.contexts()]
