"""`attach`: a transformers model and a database, for the time of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

import kvdb
from engine_adapter.base import check_client
from engine_adapter.transformers.attention import Attached, register
from engine_adapter.transformers.engine import TransformersEngine
from engine_adapter.transformers.spec import spec_of
from engine_adapter.transformers.support import text_config
from engine_adapter.transformers.trial import check_attention
from kvdb.errors import InvalidArgument

PIECE_TOKENS = 1024


@contextmanager
def attach(model: PreTrainedModel, db: kvdb.Client, *, piece_tokens: int = PIECE_TOKENS) -> Iterator[TransformersEngine]:
    """Let the model's KV cache live in the database for the time of the `with`; afterwards the model is as it was before.

    Calls of the model itself go on as before; `engine.generate` is the one that uses the database. piece_tokens: how many prompt
    tokens go through the model at once. The weights are fingerprinted here, so change them before or after, and two tokens go
    through the decoder, to see what its layers ask for. Raises Unsupported for a model that kvdb cannot serve, naming the layer
    or the feature, and InvalidArgument for one that is attached already.
    """
    if piece_tokens < 1:
        raise InvalidArgument(f"piece_tokens is {piece_tokens}; expected at least 1, such as {PIECE_TOKENS}")
    check_client(db)
    spec = spec_of(model)
    config = text_config(model)
    before = config._attn_implementation
    name = before if isinstance(before, Attached) else Attached(before)
    if id(model) in name.models:
        raise InvalidArgument("the model is attached to a database already; leave that `with` before you attach it to another")
    engine = TransformersEngine(model, db, spec, piece_tokens)
    register()
    name.models.add(id(model))
    config._attn_implementation_internal = name  # only this config; the public setter also changes the configs inside of it
    try:
        check_attention(model, spec)
        yield engine
    finally:
        name.models.discard(id(model))
        if not name.models:
            config._attn_implementation_internal = name.before
