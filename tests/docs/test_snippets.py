"""Every piece of Python in README.md and docs/ runs as it stands, page by page, with what the page says that readers have."""

import re
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.architecture.source import ROOT
from tests.engine_adapter.rag import chats
from tests.engine_adapter.tiny import build, prompts

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "kvdb://127.0.0.1:7700"
OWN_TESTS = {"docs/internals/extending.md", "docs/rag-serve.md"}
"""Pages whose Python tests/query_optimizer/test_custom_rules.py and tests/engine_adapter/rag_server/test_process.py run."""
ADAPTERS = ("engine_adapter.langchain", "engine_adapter.llama_index")
"""What needs packages that are not installed here; `make rag-adapters-test` tests them."""


def stored_context():
    """A database with a context, a session over it, and a query."""
    random = np.random.default_rng(0)
    spec = kvdb.ModelSpec("my-model", layers=2, q_heads=4, kv_heads=2, head_dim=32, dtype="float32")
    kv = [random.standard_normal((2, 2, 600, 32), np.float32) for _ in range(spec.layers)]
    db = kvdb.connect()
    db.import_context(spec, range(600), kv, name="contract.pdf")
    q = random.standard_normal((4, 1, 32), np.float32)
    session = db.create_session(spec, range(600))
    return {"db": db, "spec": spec, "tokens": list(range(600)), "session": session, "layer": 0, "q": q}


def engine():
    """What an engine has: a prompt that begins with a document, and projections of its tokens."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.standard_normal((*shape, 128), np.float32).astype(ml_dtypes.bfloat16)

    def projections(layer, start):
        return draw(32, len(prompt) - start), draw(8, len(prompt) - start), draw(8, len(prompt) - start)

    tokens = list(range(64))
    prompt = [*tokens, 7, 8, 9]
    return {
        "db": kvdb.connect(),
        "tokens": tokens,
        "kv": [(draw(8, 64), draw(8, 64)) for _ in range(32)],
        "prompt": prompt,
        "projections": projections,
        "computed": [(draw(8, 67), draw(8, 67)) for _ in range(32)],
        **{name: draw(2, heads, 1) for name, heads in (("q2", 32), ("k2", 8), ("v2", 8))},
    }


def transformers_model():
    """A model, and token ids `[1, n]`."""
    document = prompts(1, 40)
    return {"model": build(), "document": document, "document_and_question": torch.cat([document, prompts(1, 5, seed=1)], dim=1)}


def documents():
    """A model, its tokenizer with a chat template, documents and questions."""
    texts = {
        name: f"{name} {number}: signed by Ada on page {number}." for number, name in enumerate(("annex", "contract", "minutes"))
    }
    question = "Who signed it?"
    return {
        "model": build(vocab_size=100),
        "tokenizer": chats.fresh(),
        "documents": texts,
        "messages": [{"role": "user", "content": question}],
        "question": question,
        "docs": list(texts),
        "expected": "Ada",
    }


PAGES = {
    "README.md": dict,
    "docs/answers.md": stored_context,
    "docs/engines.md": engine,
    "docs/internals/layers.md": dict,
    "docs/rag.md": documents,
    "docs/sglang.md": stored_context,
    "docs/stores.md": dict,
    "docs/transformers.md": transformers_model,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Everywhere here."""


@pytest.fixture
def address():
    database = Database()
    server = Server(database, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    yield server.target
    server.stop(0)
    database.close()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    names = {"kvdb": kvdb} | PAGES[page]()
    text = (ROOT / page).read_text()
    if ADDRESS in "".join(BLOCK.findall(text)):
        text = text.replace(ADDRESS, request.getfixturevalue("address"))
    try:
        for block in BLOCK.findall(text):
            code = compile(block, page, "exec")
            if not any(adapter in block for adapter in ADAPTERS):
                exec(code, names)
    finally:
        for value in reversed(list(names.values())):
            if isinstance(value, kvdb.Session | kvdb.Client) or type(value).__name__ == "RagEngine":
                with suppress(kvdb.errors.SessionClosed):
                    value.close()


def test_every_page_with_python_is_run():
    pages = {page.relative_to(ROOT).as_posix() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    assert {page for page in pages if BLOCK.search((ROOT / page).read_text())} == set(PAGES) | OWN_TESTS
