"""The tokens of instructions, documents and questions."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from engine_adapter.rag.answers import Tokenizer
from kvdb.errors import InvalidArgument

Text = str | Sequence[int]
QUESTION = "{question}"


class Prompts:
    """A prompt is the instruction, documents, and the template with the question in it.

    vocabulary: the number of tokens that the model knows. Raises InvalidArgument for a template without {question}.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, instruction: Text, template: str) -> None:
        if QUESTION not in template:
            raise InvalidArgument(f"template is {template!r}; expected {QUESTION} in it, where the question goes")
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template = template
        self.instruction = self._ids(instruction, "the instruction", first=True)

    def document(self, text: Text, what: str) -> list[int]:
        """Raises InvalidArgument for one without tokens, or with ids that the model does not know."""
        return self._filled(self._ids(text, what), what)

    def question(self, question: Text) -> list[int]:
        """Token ids stand as they are; a string goes into the template. Raises InvalidArgument as `document`."""
        text = self._template.replace(QUESTION, question) if isinstance(question, str) and question else question
        return self._filled(self._ids(text, "the question"), "the question")

    def text(self, ids: list[int]) -> str:
        """The text of some tokens of a document."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _ids(self, text: Text, what: str, *, first: bool = False) -> list[int]:
        """first: whether it stands at the beginning of a prompt, with the tokens that the tokenizer puts there."""
        if isinstance(text, str):
            return list(self.tokenizer.encode(text, add_special_tokens=first))
        ids = np.asarray(text)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidArgument(f"{what} is {_shown(text)}; expected a string or a list of token ids")
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise InvalidArgument(f"{what} has token ids {ids.min()} to {ids.max()}; expected 0 to {self._vocabulary - 1}")
        known: list[int] = ids.tolist()
        return known

    def _filled(self, ids: list[int], what: str) -> list[int]:
        if not ids:
            raise InvalidArgument(f"{what} is empty; expected at least one token")
        return ids


def digest(ids: Sequence[int]) -> str:
    """A digest of token ids, equal for equal ids."""
    return sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()


def _shown(given: Any) -> str:
    text = repr(given)
    return f"{text[:40]}..." if len(text) > 40 else text
