"""What a retriever hands over: documents by their ids, or by id and text."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from kvdb.errors import InvalidArgument


class HasText(Protocol):
    """A document of a retriever; its id may be None."""

    @property
    def id(self) -> str | None: ...

    @property
    def text(self) -> str: ...


Doc = str | HasText | Mapping[str, Any]
"""A document by its id, an object with id and text, or {"id": ..., "text": ...}."""


class Retrieved(NamedTuple):
    """A document and its text, None for one that is there already."""

    id: str
    text: str | None


def retrieved(docs: Any) -> list[Retrieved]:
    """The documents of a prompt, in their order. One with a text and no id has one by its text. Raises InvalidArgument for
    anything else, and for one id with two texts."""
    given = docs if isinstance(docs, Iterable) and not isinstance(docs, str | bytes | Mapping) else None
    found = None if given is None else [_retrieved(doc) for doc in given]
    if found is None or None in found:
        raise InvalidArgument(
            f"docs is {docs!r}; expected a list of documents' ids, each a string that is not empty, or objects with id and text"
        )
    whole = [doc for doc in found if doc is not None]
    texts: dict[str, str] = {}
    for doc in whole:
        if doc.text is not None and texts.setdefault(doc.id, doc.text) != doc.text:
            raise InvalidArgument(f"document {doc.id!r} comes with two texts; give each text an id of its own")
    return whole


def _retrieved(doc: Any) -> Retrieved | None:
    if isinstance(doc, str):
        return Retrieved(doc, None) if doc else None
    if isinstance(doc, Mapping):
        doc_id, text = doc.get("id"), doc.get("text")
    else:
        doc_id, text = getattr(doc, "id", None), getattr(doc, "text", None)
    if not isinstance(text, str | None) or not isinstance(doc_id, str | None) or (not doc_id and not text):
        return None
    return Retrieved(doc_id or f"text-{sha256(str(text).encode(errors='surrogatepass')).hexdigest()[:32]}", text)
