"""The tokens of instructions, documents and questions."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from engine_adapter.rag.answers import Tokenizer
from engine_adapter.rag.chat import ChatFormat, ChatTemplate
from engine_adapter.rag.control import Encoder, control_tokens
from engine_adapter.rag.messages import Message, messages_of, shown
from kvdb.errors import InvalidArgument

Text = str | Sequence[int]
QUESTION = "{question}"


class Around(NamedTuple):
    """The token ids that stand before the documents of a prompt, and behind them."""

    before: list[int]
    behind: list[int]


class Prompts:
    """A prompt is the instruction, documents, and the template with the question in it, or a chat.

    Control tokens are read in the instruction and the template of a plain prompt, in the tokenizer's own template of a chat, and
    in the header and separator of its documents; in documents and questions, and in the messages of a chat, they are text. Token
    ids stand as they are.

    vocabulary: the number of tokens that the model knows. chat: how documents stand in a chat, None for plain prompts. Raises
    InvalidArgument for a template without {question}, or where the tokenizer has none for a chat.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, instruction: Text, template: str = QUESTION, chat: ChatFormat | None = None
    ) -> None:
        if QUESTION not in template:
            raise InvalidArgument(f"template is {template!r}; expected {QUESTION} in it, where the question goes")
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._vocabulary = vocabulary
        self._template = template
        if chat is None:
            self._chat = None
            self.instruction = self._ids(instruction, "the instruction", first=True)
        else:
            self._chat = _template(self._encoder, instruction, template, chat)
            self.instruction = self._encoder.encode(self._chat.beginning)

    @property
    def is_chat(self) -> bool:
        return self._chat is not None

    def document(self, doc_id: str, text: Text) -> list[int]:
        """The tokens of a document, in a chat with what stands around it. Raises InvalidArgument for one without tokens, or with
        ids that the model does not know."""
        what = f"document {doc_id!r}"
        plain = self._encoder.plain(text, what) if isinstance(text, str) else text
        ids = _filled(self._ids(plain, what), what)
        if self._chat is None:
            return ids
        header, separator = self._chat.around_document(doc_id)
        if isinstance(plain, str):
            return self._encoder.encode(header + plain + separator)
        return [*self._encoder.encode(header), *ids, *self._encoder.encode(separator)]

    def question(self, question: Text, *, documents: bool) -> Around:
        """What stands around the documents of a question; in a chat it is the message of a user. documents: whether there are
        any. Raises InvalidArgument as `document`."""
        if isinstance(question, str) and question and self._chat is not None:
            return self.chat([Message("user", question)._asdict()], documents=documents)
        text = question
        if isinstance(question, str) and question:
            text = self._template.replace(QUESTION, self._encoder.plain(question, "the question"))
        return Around(self.instruction, _filled(self._ids(text, "the question"), "the question"))

    def chat(self, messages: Any, *, documents: bool) -> Around:
        """What stands around the documents of a chat. Raises InvalidArgument for what are no messages, and where there is no
        chat."""
        if self._chat is None:
            raise InvalidArgument("the engine answers plain questions; leave chat= out, or make it with chat=True, for messages")
        texts = self._chat.around(messages_of(messages), documents=documents)
        before, behind = map(self._encoder.encode, texts)
        return Around(before, behind)

    def text(self, ids: list[int]) -> str:
        """The text of some tokens of a document."""
        return self._encoder.decode(ids)

    def _ids(self, text: Text, what: str, *, first: bool = False) -> list[int]:
        """first: whether it stands at the beginning of a prompt, with the tokens that the tokenizer puts there."""
        if isinstance(text, str):
            return self._encoder.encode(text, first=first)
        ids = np.asarray(text)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidArgument(f"{what} is {shown(text)}; expected a string or a list of token ids")
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise InvalidArgument(f"{what} has token ids {ids.min()} to {ids.max()}; expected 0 to {self._vocabulary - 1}")
        known: list[int] = ids.tolist()
        return known


def chat_format(chat: bool | ChatFormat | None, tokenizer: Tokenizer, instruction: Text, template: str) -> ChatFormat | None:
    """How documents stand in a chat, None for plain prompts; see `RagEngine`. Raises InvalidArgument for what says neither."""
    if chat is not None:
        return ChatFormat.of(chat)
    own = template != QUESTION or not isinstance(instruction, str) or any(map(instruction.count, control_tokens(tokenizer)))
    return ChatFormat() if getattr(tokenizer, "chat_template", None) and not own else None


def digest(ids: Sequence[int]) -> str:
    """A digest of token ids, equal for equal ids."""
    return sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()


def _template(encoder: Encoder, instruction: Text, template: str, chat: ChatFormat) -> ChatTemplate:
    """Raises InvalidArgument for what a chat does not take."""
    if not isinstance(instruction, str):
        raise InvalidArgument("the instruction of a chat is the system's message; expected a string")
    if template != QUESTION:
        raise InvalidArgument("a chat has the tokenizer's own template; leave template= away, or chat=")
    return ChatTemplate(encoder, instruction, chat)


def _filled(ids: list[int], what: str) -> list[int]:
    if not ids:
        raise InvalidArgument(f"{what} is empty; expected at least one token")
    return ids
