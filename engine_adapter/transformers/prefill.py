"""What goes through the model: of a prompt the tokens that the database has not stored, in pieces, and of a model's input the
columns that its cache does not hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

import kvdb
from engine_adapter.base import Progress
from engine_adapter.transformers.cache import Row, SessionCache
from engine_adapter.transformers.window_layer import layers_of

QUESTION_TOKENS_MAX = 256
"""A longer run of tokens behind the stored ones is a text of its own, and reads everything, because the KV that it leaves in the
database has to be exact."""

EXACT = kvdb.QueryOptions(kvdb.Exact())

OF_COLUMNS = ("input_ids", "position_ids")
"""Arguments of a model with one column, the last dimension, for each token of its input."""


def prefill(
    model: PreTrainedModel,
    session: kvdb.Session,
    tokens: torch.Tensor,
    piece_tokens: int,
    progress: Progress | None = None,
    options: kvdb.QueryOptions = EXACT,
    begin: int | None = None,
) -> None:
    """Compute tokens [begin, n) and leave their keys and values in the session, which holds those before them.

    tokens: int64 `[n]`, all of the prompt. begin: None for session.start. progress: called as (done, n), first with what was
    stored already. options: which tokens a question reads, one of up to QUESTION_TOKENS_MAX tokens; more are a text, which reads
    everything. Only the decoder runs, because the head's logits are not needed. Raises Unsupported and what `Session.attend`
    raises; the session is then unfinished.
    """
    decoder = model.get_decoder()
    n, held = len(tokens), session.start if begin is None else begin
    chosen = options if n - held <= QUESTION_TOKENS_MAX else EXACT
    cache = SessionCache(session.spec, [Row(session)], held, chosen, make=layers_of(model))
    if progress is not None:
        progress(held, n)
    with torch.no_grad():
        for start in range(held, n, piece_tokens):
            piece = tokens[start : start + piece_tokens]
            decoder(input_ids=piece.unsqueeze(0).to(model.device), past_key_values=cache, use_cache=True)
            if progress is not None:
                progress(start + len(piece), n)
    cache.check_answered()


@contextmanager
def only_new_columns(model: PreTrainedModel, cache: SessionCache) -> Iterator[None]:
    """Within the `with`, leave out of the model's input what this cache, of one row, holds.

    Where drafts are checked, transformers puts the whole prompt through the model at first, whatever the cache holds.
    """

    def drop(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("past_key_values") is not cache:
            return args, kwargs
        end = int(kwargs["position_ids"][0, -1]) + 1 + cache.rows[0].padding  # positions count tokens
        held = max(cache.get_seq_length() - (end - kwargs["input_ids"].shape[-1]), 0)
        left = {name: kwargs[name][..., held:] for name in OF_COLUMNS if kwargs.get(name) is not None}
        return args, {**kwargs, **left}

    hook = model.register_forward_pre_hook(drop, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
