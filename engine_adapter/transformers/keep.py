"""The `keep=` of a generation: prompts with their answers are stored under the names that it gives them."""

from collections.abc import Sequence
from contextlib import ExitStack
from uuid import uuid4

import torch
from transformers import GenerationConfig

import kvdb
from engine_adapter.transformers.options import beams_of
from engine_adapter.transformers.prompts import PromptBatch, end_tokens
from kvdb.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported

Names = Sequence[str | None]
"""A name for each returned sequence; None for those that are not stored."""


def names_of(db: kvdb.Client, keep: str | Names | None, rows: int, settings: GenerationConfig) -> Names:
    """The names for the sequences that a generation of `prompts` prompts returns, checked to be free; none if nothing is kept.

    Raises InvalidArgument, AlreadyExists or Unsupported.
    """
    if keep is None:
        return []
    names = [keep] if isinstance(keep, str) else list(keep)
    if (settings.num_beams or 1) > 1:
        raise Unsupported("keep= with beam search, where the sessions of returned sequences are gone; call engine.store then")
    expected = rows * beams_of(settings)
    if len(names) != expected:
        raise InvalidArgument(f"keep= names {len(names)} sequences; expected {expected}, one name or None for each returned")
    given = [name for name in names if name is not None]
    if len(set(given)) < len(given):
        raise InvalidArgument(f"keep= gives one name to two sequences ({', '.join(given)}); expected a name for each")
    for name in given:
        check_free(db, name)
    return names


def check_free(db: kvdb.Client, name: str) -> None:
    """Raises AlreadyExists for a name that is taken."""
    try:
        db.get(name)
    except NotFound:
        return
    raise AlreadyExists(f"there is a context named {name!r}; take another name, or drop it first")


def keep_answers(
    db: kvdb.Client,
    names: Names,
    sessions: Sequence[kvdb.Session],
    prompts: PromptBatch,
    sequences: torch.Tensor,
    settings: GenerationConfig,
) -> None:
    """Store the sequences that have a name, each without its last token, which the model has not read, and without padding.

    A failure takes back what was stored before it.
    """
    if not names:
        return
    each = len(sequences) // len(prompts.rows)
    with ExitStack() as undo:
        for i, (name, session) in enumerate(zip(names, sessions, strict=True)):
            if name is not None:
                answer, prompt = sequences[i, prompts.ids.shape[1] : -1], prompts.rows[i // each].tokens
                tokens = torch.cat([prompt.to(answer.device), answer])
                _store_beginning(db, session, tokens, len(prompt) + answer_length(answer, settings), name)
                undo.callback(db.drop, name)
        undo.pop_all()


def answer_length(answer: torch.Tensor, settings: GenerationConfig) -> int:
    """The number of a row's new tokens that count: those up to the first that ends a text, without padding behind it."""
    ends = torch.isin(answer, torch.tensor(end_tokens(settings), dtype=answer.dtype, device=answer.device)).nonzero()
    if len(ends):
        return int(ends[0]) + 1
    real = answer.ne(-1 if settings.pad_token_id is None else settings.pad_token_id).nonzero()
    return int(real[-1]) + 1 if len(real) else 0


def _store_beginning(db: kvdb.Client, session: kvdb.Session, tokens: torch.Tensor, count: int, name: str) -> None:
    """Store a session's first `count` tokens; what follows is the filling of a row that ended before the others of its batch.

    The whole is stored under a passing name, so that a view of its beginning can be.
    """
    if count == len(tokens):
        db.store(session, name=name, tokens=tokens)
        return
    whole = f"{name} (whole, {uuid4().hex})"
    db.store(session, name=whole, tokens=tokens)
    try:
        with db.create_session(session.spec, tokens[:count]) as beginning:
            db.store(beginning, name=name)
    finally:
        db.drop(whole)
