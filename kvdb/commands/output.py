"""Writing to any stdout: one whose encoding lacks our characters, a pipe whose reader went away, a full disk."""

import io
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress

BAR = 20
"""The length of a bar in characters."""
GAP = "  "
"""Between two columns."""


def escape_characters() -> None:
    """Escape characters that the encoding of stdout lacks, as stderr does by itself, so that no context's name can end a command
    with an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drawn(characters: str, plain: str) -> str:
    """`characters` if the encoding of stdout has them, else `plain`."""
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return plain
    return characters


def bar(share: float) -> str:
    """Full blocks for the share that is done, light ones for the rest."""
    done = round(BAR * share)
    return drawn("█", "#") * done + drawn("░", ".") * (BAR - done) + f" {share:4.0%}"


def table(rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Rows in columns, the first one their titles. left: titles of columns that are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.ljust if title in left else str.rjust for title in rows[0]]
    lines = (zip(justify, row, widths, strict=True) for row in rows)
    return "\n".join(GAP.join(just(cell, width) for just, cell, width in line).rstrip() for line in lines)


def flush() -> None:
    """Write out what is buffered, while an error can still be reported. Raises OSError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_unwritable() -> None:
    """Redirect stdout to nowhere if it cannot be written, because the interpreter would fail at it once more when it ends."""
    try:
        flush()
    except OSError:
        with suppress(OSError):  # stdout is no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
