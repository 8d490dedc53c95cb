"""Keeps the texts of users and documents from being read as a tokenizer's control tokens."""

import re
from typing import Any

from engine_adapter.rag.answers import Tokenizer
from kvdb.errors import InvalidArgument

BREAK = "\ufdd0"
DOCUMENTS = "\ufdd1"
"""Marks of our own in a text: where it is cut into pieces that are encoded apart, and where documents stand in a chat. Unicode
keeps both code points out of texts; one that has them anyway gets U+FFFD there."""

Marks = str.maketrans({BREAK: "\N{REPLACEMENT CHARACTER}", DOCUMENTS: "\N{REPLACEMENT CHARACTER}"})


class Encoder:
    """A tokenizer that reads control tokens, such as the end of a turn, where a template or an instruction has them, and nowhere
    else.

    Control tokens are the special ones, and those added tokens that the chat template names, whether special or not. Their texts
    in what others wrote are encoded as any text: cut in two, the halves apart.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        control = control_tokens(tokenizer)
        unknown = getattr(tokenizer, "unk_token_id", None)  # which any text may hold
        self._ids = frozenset(control.values()) - {unknown}
        # A text may begin within another's, so each is found where it begins, and cut behind its first character.
        texts = "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True) if len(text) > 1)
        self._begin = re.compile(f"(?=(?:{texts}))(.)", re.DOTALL) if texts else None

    def plain(self, text: str, what: str) -> str:
        """The text, marked so that `encode` finds no control token in it. Raises InvalidArgument where that cannot be helped,
        with a token of one character."""
        marked = text.translate(Marks)
        if self._begin is not None:
            marked = self._begin.sub(rf"\1{BREAK}", marked)
        found = self._ids.intersection(self.encode(marked)) if self._ids else ()
        if found:
            name = self.decode([min(found)])
            raise InvalidArgument(f"{what} holds {name!r}, which the tokenizer takes for a control token however it is written")
        return marked

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """The token ids of a text that may hold marks. first: whether it stands at the beginning of a prompt, with the tokens
        that the tokenizer puts there."""
        head, *rest = text.split(BREAK)
        ids = list(self.tokenizer.encode(head, add_special_tokens=first))
        for piece in rest:
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, control tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """The texts of a tokenizer's control tokens and their ids; none for one that has no such thing."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {str(token): int(i) for i, token in added.items() if token.special or (str(token).strip() and str(token) in template)}
    special = zip(getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ()), strict=True)
    return texts | {str(text): int(i) for text, i in special}
