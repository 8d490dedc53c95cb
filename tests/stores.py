"""Contexts of a tiny model for tests of stores: what they hold is a function of their tokens, so any answer can be checked."""

import numpy as np

import kvdb
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("model", layers=2, q_heads=2, kv_heads=1, head_dim=16, dtype="float32", rope=kvdb.Rope())
TOKENS_MAX = 64
"""There are as many different tokens."""
_rng = np.random.default_rng(7)
_TABLE = _rng.standard_normal((TOKENS_MAX, 2, SPEC.layers, SPEC.kv_heads, SPEC.head_dim)).astype(np.float32)
_QUERY = _rng.standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)


def config(**storage):
    """The settings of a small database that builds no indexes."""
    return Config(
        storage=StorageConfig(arena_bytes=1 << 20, **storage),
        optimizer=OptimizerConfig(machine_file=""),
        indexes=IndexConfig(on_demand="", automatic=False),
    )


def connect(folder, **storage):
    """A client of the store in a folder."""
    return kvdb.connect(folder, config=config(**storage))


def kv_of(tokens):
    """Keys and values, a pair for each layer: those of each token depend on all before it, as a model's do."""
    summed = np.cumsum(_TABLE[np.asarray(tokens) % TOKENS_MAX], axis=0) / 8
    return [tuple(summed[:, side, layer].transpose(1, 0, 2) for side in range(2)) for layer in range(SPEC.layers)]


def put(db, tokens, name, durability=None, **retention):
    """Import a context of these tokens."""
    db.import_context(SPEC, tokens, kv_of(tokens), name=name, durability=durability, **retention)


def compacted(db):
    """An embedded database whose segments take as little space as they will, with nothing left to do in the background."""
    db.compact()
    return db


def names(db):
    return [context.name for context in db.contexts()]


def holds(db, tokens):
    """Whether a session over these tokens finds all of them stored. Raises AssertionError if it does not answer by their keys and
    values."""
    with db.create_session(SPEC, tokens) as session:
        if session.reused != len(tokens):
            return False
        answers = [session.attention(layer, _QUERY) for layer in range(SPEC.layers)]
    expected = [attention(_QUERY, k, v, SPEC.softmax_scale)[0] for k, v in kv_of(tokens)]
    assert all(relative_error(got, want) < 1e-5 for got, want in zip(answers, expected, strict=True)), "a wrong answer"
    return True
