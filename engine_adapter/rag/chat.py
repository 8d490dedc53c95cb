"""Prompts in the form of a chat, by the tokenizer's own template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from engine_adapter.rag.control import BREAK, DOCUMENTS, Encoder
from engine_adapter.rag.messages import Message
from kvdb.errors import InvalidArgument

ID = "{id}"
Turn = Literal["system", "user"]


@dataclass(frozen=True)
class ChatFormat:
    """How documents stand in a chat.

    header: stands before each document, with its id where it says {id}; it is computed with the document, once. separator: stands
    behind the instruction and behind each document. turn: where documents stand, behind the instruction in the system's turn, or
    in the first user's; None for the system's where the template has one. variables: what else the template knows, such as
    {"enable_thinking": False}. Header and separator are the application's own, so control tokens in them are such.
    """

    header: str = "Document {id}:\n"
    separator: str = "\n\n"
    turn: Turn | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: "bool | ChatFormat") -> "ChatFormat | None":
        """True stands for the default, and False for no chat. Raises InvalidArgument for anything else."""
        if isinstance(given, bool):
            return cls() if given else None
        if not isinstance(given, cls):
            raise InvalidArgument(f"chat is {given!r}; expected True, False, a ChatFormat, or None for what the tokenizer has")
        if given.turn not in {None, "system", "user"}:
            raise InvalidArgument(f"turn is {given.turn!r}; expected 'system', 'user', or None for what the template allows")
        return given


class ChatTemplate:
    """A tokenizer's chat template with a place for documents.

    A prompt is what stands before the documents, which is the same for all questions, the documents, and what stands behind them:
    the rest of the turn, earlier messages, and the question. Where nobody has written a control token, the tokens are those of
    `apply_chat_template` but at the ends of documents, where the text is cut.
    """

    def __init__(self, encoder: Encoder, instruction: str, form: ChatFormat) -> None:
        """Raises InvalidArgument for a tokenizer without a template, or with one that has no place for documents."""
        if not getattr(encoder.tokenizer, "chat_template", None):
            raise InvalidArgument(
                "the tokenizer has no chat template; set tokenizer.chat_template, or make the engine without chat=True"
            )
        self._encoder = encoder
        self._form = form
        self._instruction = encoder.plain(instruction, "the instruction")
        self._has_system = self._renders([Message("system", DOCUMENTS), Message("user", BREAK)])
        turns: list[Turn] = [form.turn] if form.turn else ["system", "user"] if self._has_system else ["user"]
        short = [Message("user", "a")]
        long = [*short, Message("assistant", "b"), Message("user", "c")]
        for self._turn in turns:
            heads = {self._head(messages) for messages in (short, long)}
            if len(heads) == 1 and None not in heads:
                return
        places = " or ".join(turns)
        raise InvalidArgument(
            f"the chat template has no place for documents in the turn of {places} that is the same for every chat; "
            "make the engine with another ChatFormat, or with chat=False for plain prompts"
        )

    @property
    def beginning(self) -> str:
        """What stands before documents, with marks."""
        return str(self._head([Message("user", "a")]))

    def around_document(self, doc_id: str) -> tuple[str, str]:
        """What stands before a document and behind it, with marks."""
        return self._form.header.replace(ID, self._encoder.plain(doc_id, "the document's id")), self._form.separator

    def around(self, messages: Sequence[Message], *, documents: bool) -> tuple[str, str]:
        """What stands before and behind documents, with marks. documents: whether there are any; all of it stands behind where
        there are none. Raises InvalidArgument for messages that the template does not take."""
        plain = [Message(role, self._encoder.plain(text, "a message")) for role, text in messages]
        try:
            if not documents:
                return "", self._render(self._filled(plain, ""))
            before, *behind = self._render(self._filled(plain, DOCUMENTS)).split(DOCUMENTS)
        except TemplateError as error:
            raise InvalidArgument(f"the chat template does not take these messages: {error}") from error
        if len(behind) != 1:
            raise InvalidArgument(
                "the chat template has no one place for documents with these messages; try another ChatFormat.turn"
            )
        return before, behind[0]

    def _filled(self, messages: Sequence[Message], documents: str) -> list[Message]:
        """The messages with the instruction and the place of documents in them.

        A system message that comes first stands behind the documents, unless it says the instruction, so that what is before them
        is the same for all.
        """
        said, rest = "", list(messages)
        if rest[0].role == "system":
            said = rest.pop(0).content
            said = "" if said == self._instruction else said
        behind = self._form.separator if self._instruction and (documents or said) else ""
        before = self._instruction + behind
        if self._turn == "system":
            content = before + documents + said
            return [Message("system", content), *rest] if content else rest
        first = next((i for i, message in enumerate(rest) if message.role == "user"), None)
        if first is None:
            raise InvalidArgument("no message is a user's; expected one, in whose turn documents stand")
        said += self._form.separator if said else ""
        question = documents + said + rest[first].content
        if not self._has_system:
            return [*rest[:first], Message("user", before + question), *rest[first + 1 :]]
        turn = [Message("system", self._instruction)] if self._instruction else []
        return [*turn, *rest[:first], Message("user", question), *rest[first + 1 :]]

    def _head(self, messages: Sequence[Message]) -> str | None:
        """What stands before documents; None where the template has no one place for them."""
        try:
            return self.around(messages, documents=True)[0]
        except InvalidArgument:
            return None

    def _renders(self, messages: Sequence[Message]) -> bool:
        """Whether the template says all that these messages do."""
        try:
            return all(message.content in self._render(messages) for message in messages)
        except TemplateError:
            return False

    def _render(self, messages: Sequence[Message]) -> str:
        tokenizer: Any = self._encoder.tokenizer  # which has a template
        said = [message._asdict() for message in messages]
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **dict(self._form.variables)))
