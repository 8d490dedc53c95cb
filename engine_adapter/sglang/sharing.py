"""One context for SGLang and for engines that know its tokens.

SGLang tells keys and no tokens, so what it keeps is found by keys alone. Whoever has the tokens of a prompt has the keys of its
pages too, and takes the KV over with `adopt`; `offer` gives SGLang what another engine stored.
"""

from typing import Any

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.sglang.keys import page_ids, page_keys

SALT = "sglang"
"""The salt of what an engine of one rank keeps; the keys say what else the KV differs in."""


def adopt(contexts: ModelContexts, tokens: Any, page_size: int, *, seed: str | None = None, salt: str = "") -> int:
    """Store what SGLang keeps of a prompt under its tokens, where that is more than is stored. Returns how many leading tokens
    are stored now.

    page_size, seed: as in `page_keys`. salt: whom the context belongs to, as in `kvdb.Client.import_context`. Raises what
    `kvdb.Client.import_context` and `kvdb.Session.read` raise.
    """
    with contexts.open(page_ids(page_keys(tokens, page_size, seed), page_size), SALT) as kept:
        found = kept.reused // page_size * page_size
        if found > (known := contexts.find(tokens, salt)):
            _copy(contexts, kept, tokens[:found], salt)
        return max(found, known)


def offer(contexts: ModelContexts, tokens: Any, page_size: int, *, seed: str | None = None, salt: str = "") -> int:
    """Keep what is stored of a prompt as SGLang finds it, in full pages. Returns how many leading tokens SGLang finds now.

    The parameters and errors are those of `adopt`.
    """
    with contexts.open(tokens, salt) as stored:
        ids = page_ids(page_keys(tokens[: stored.reused], page_size, seed), page_size)
        if len(ids) > (known := contexts.find(ids, SALT) // page_size * page_size):
            _copy(contexts, stored, ids, SALT)
        return max(len(ids), known)


def _copy(contexts: ModelContexts, source: kvdb.Session, tokens: Any, salt: str) -> None:
    """Keep the first KV of a session under other ids; what is stored of these is not copied again."""
    with contexts.open(tokens, salt) as sequence:
        for layer in range(sequence.spec.layers):
            k, v = source.read(layer, sequence.reused, len(tokens))
            sequence.update(layer, k, v, start=sequence.reused)
        contexts.keep(sequence, tokens, salt)
