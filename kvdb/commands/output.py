"""stdout, whatever it is: an encoding without our characters, a pipe whose reader went away, a full disk."""

import io
import os
import sys
from contextlib import suppress


def escape_characters() -> None:
    """Escape what the encoding of stdout lacks, as stderr does by itself: no name of a context may end a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drawn(characters: str, plain: str) -> str:
    """`characters` where stdout has them, else `plain`."""
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return plain
    return characters


def flush() -> None:
    """Write out what is buffered, while an error can still be reported. Raises OSError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_unwritable() -> None:
    """Where stdout cannot be written, lead it to nowhere: the interpreter would fail at it once more when it ends."""
    try:
        flush()
    except OSError:
        with suppress(OSError):  # stdout is no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
