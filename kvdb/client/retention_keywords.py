"""The keywords by which a caller says how a new context is to be kept."""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from kvdb.client.known_keywords import check_keywords
from kvdb.types import Retention


class RetentionKeywords(TypedDict, total=False):
    """The fields of `kvdb.types.Retention`; see `Client.import_context`."""

    durability: str | None
    ttl: float | None
    metadata: Mapping[str, Any] | None
    pinned: bool
    format: str | None


def retention_of(**keywords: Unpack[RetentionKeywords]) -> Retention:
    """What the keywords say. Raises InvalidArgument for other keywords."""
    check_keywords("a new context", keywords, RetentionKeywords.__annotations__)
    return Retention(**keywords)
