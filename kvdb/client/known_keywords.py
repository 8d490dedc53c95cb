"""Keywords that no call knows are told with the nearest that one does."""

import difflib
from collections.abc import Iterable

from kvdb.errors import InvalidArgument


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidArgument for a keyword that is not known. what: takes the keywords."""
    listed = list(known)
    for name in given:
        if name not in listed:
            expected = ", ".join(sorted(listed))
            raise InvalidArgument(f"{what} has no keyword {name}=; expected some of {expected}{meant(name, listed)}")


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown keyword: which was probably meant, nothing where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}=?" if near else ""
