"""What the tenants of a server may be called."""

import re
from collections.abc import Iterable
from typing import Any

from kvdb.errors import InvalidArgument

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A tenant's contexts are stored as TENANT/NAME, so its own name holds no slash."""
SHARED_MAX = 64
"""With how many tenants a context may be shared."""


def shared_with(given: Any) -> tuple[str, ...]:
    """The tenants that a context is shared with, in order and each once. Raises InvalidArgument for what are no names."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"shared_with is {given!r:.200}; expected the names of tenants, such as ['search']")
    names = list(given)
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidArgument(
                f"shared_with holds {name!r:.200}; expected names of letters, digits, dots, dashes and underscores, at most 64"
            )
    if len(set(names)) > SHARED_MAX:
        raise InvalidArgument(f"shared_with holds {len(set(names))} tenants; expected at most {SHARED_MAX}")
    return tuple(sorted(set(names)))
