"""`attach`: a transformers model and a database, for the time of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

import kvdb
from engine_adapter.base import check_client
from engine_adapter.transformers.answerable import named, refused
from engine_adapter.transformers.described import kept_model
from engine_adapter.transformers.engine import TransformersEngine
from engine_adapter.transformers.own.engine import OwnEngine
from engine_adapter.transformers.spec import fingerprint_of, spec_with
from kvdb.errors import InvalidArgument

PIECE_TOKENS = 1024
STATE_TOKENS = 4096


@contextmanager
def attach(
    model: PreTrainedModel, db: kvdb.Client, *, piece_tokens: int = PIECE_TOKENS, state_tokens: int = STATE_TOKENS
) -> Iterator[TransformersEngine]:
    """Let the model's KV cache live in the database for the time of the `with`; afterwards the model is as it was before.

    Calls of the model itself go on as before; `engine.generate` is the one that uses the database. kvdb answers the attention of
    a model whose layers ask for what it computes. Any other attends itself, and what its own cache keeps is stored, found and
    handed back (`engine_adapter.transformers.own`); such are windows with sinks, latents, indexers and recurrent states.

    piece_tokens: how many prompt tokens go through the model at once. state_tokens: `engine.store` keeps the states of a model
    that has such at multiples of so many tokens, and at the end; a prompt goes on from the last of them that it shares. The
    weights are fingerprinted here, so change them before or after, and a few tokens go through the decoder, to see what its
    layers ask for and keep. Raises Unsupported for a model that kvdb can neither answer nor store, naming the layer or the
    feature, and InvalidArgument for one that is attached already.
    """
    for name, value in (("piece_tokens", piece_tokens), ("state_tokens", state_tokens)):
        if value < 1:
            raise InvalidArgument(f"{name} is {value}; expected at least 1, such as {PIECE_TOKENS}")
    check_client(db)
    if refused(model) is None:
        with _answered(model, db, piece_tokens) as engine:
            yield engine
    else:
        with _handed_back(model, db, piece_tokens, state_tokens) as own:
            yield own


@contextmanager
def _answered(model: PreTrainedModel, db: kvdb.Client, piece_tokens: int) -> Iterator[TransformersEngine]:
    """An engine whose database answers the model's attention."""
    engine = TransformersEngine(model, db, spec_with(model, fingerprint_of(model)), piece_tokens)
    with named(model):
        yield engine


@contextmanager
def _handed_back(model: PreTrainedModel, db: kvdb.Client, piece_tokens: int, state_tokens: int) -> Iterator[OwnEngine]:
    """An engine whose model attends itself. Raises Unsupported where its cache cannot be stored and handed back."""
    kept = kept_model(model)
    engine = OwnEngine(kept, db, kept.spec(fingerprint_of(model)), piece_tokens, state_tokens)
    try:
        yield engine
    finally:
        engine.attached = False
