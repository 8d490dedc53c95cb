"""The messages of a chat, as applications send them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvdb.errors import InvalidArgument

Messages = Sequence[Mapping[str, Any]]
"""{"role": ..., "content": ...} each; content is a text, or a list of {"type": "text", "text": ...}."""


class Message(NamedTuple):
    """One message: who says it ("system", "user", "assistant", or what else the template knows), and what."""

    role: str
    content: str


def messages_of(given: Any) -> list[Message]:
    """Raises InvalidArgument unless these are messages, the last of them not the model's own."""
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping) else []
    if not listed:
        raise InvalidArgument(f"messages is {shown(given)}; expected a list of {{'role': ..., 'content': ...}}, at least one")
    messages = [_message(number, one) for number, one in enumerate(listed)]
    if messages[-1].role == "assistant":
        raise InvalidArgument("the last message is the assistant's; expected one that it is to answer")
    return messages


def _message(number: int, given: Any) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(role, str) or not role:
        raise InvalidArgument(f"messages[{number}] is {shown(given)}; expected a role, such as 'user', and a content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        content = None if None in texts or not all(isinstance(text, str) for text in texts) else "".join(map(str, texts))
    if not isinstance(content, str):
        raise InvalidArgument(f"messages[{number}].content is {shown(content)}; expected a text, or a list of texts' parts")
    return Message(role, content)


def shown(given: Any) -> str:
    """A value as a message tells it, short."""
    text = repr(given)
    return f"{text[:60]}..." if len(text) > 60 else text
