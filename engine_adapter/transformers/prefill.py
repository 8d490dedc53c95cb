"""Brings a prompt into a session: its tokens that the database has not stored go through the model, in pieces."""

import torch
from transformers import PreTrainedModel

import kvdb
from engine_adapter.base import Progress
from engine_adapter.transformers.cache import Row, SessionCache

QUESTION_TOKENS_MAX = 256
"""A longer run of tokens behind the stored ones is a text of its own, and reads everything, because the KV that it leaves in the
database has to be exact."""

EXACT = kvdb.QueryOptions(kvdb.Exact())


def prefill(
    model: PreTrainedModel,
    session: kvdb.Session,
    tokens: torch.Tensor,
    piece_tokens: int,
    progress: Progress | None = None,
    options: kvdb.QueryOptions = EXACT,
) -> None:
    """Compute tokens [session.start, n) and leave their keys and values in the session.

    tokens: int64 `[n]`, all of the prompt. progress: called as (done, n), first with what was stored already. options: which
    tokens a question reads, one of up to QUESTION_TOKENS_MAX tokens; more are a text, which reads everything. Only the decoder
    runs, because the head's logits are not needed. Raises Unsupported and what `Session.attend` raises; the session is then
    unfinished.
    """
    decoder = model.get_decoder()
    n = len(tokens)
    chosen = options if n - session.start <= QUESTION_TOKENS_MAX else EXACT
    cache = SessionCache(session.spec, [Row(session)], session.start, chosen)
    if progress is not None:
        progress(session.start, n)
    with torch.no_grad():
        for start in range(session.start, n, piece_tokens):
            piece = tokens[start : start + piece_tokens]
            decoder(input_ids=piece.unsqueeze(0).to(model.device), past_key_values=cache, use_cache=True)
            if progress is not None:
                progress(start + len(piece), n)
    cache.check_answered()
