"""The keywords by which a caller says how a new context is to be kept."""

from collections.abc import Mapping
from typing import Any, TypedDict


class RetentionKeywords(TypedDict, total=False):
    """The fields of `kvdb.types.Retention`; see `Client.import_context`."""

    durability: str | None
    ttl: float | None
    metadata: Mapping[str, Any] | None
    pinned: bool
    format: str | None
