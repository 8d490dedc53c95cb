"""A stretch of a run."""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens [begin, end) of one segment or tail, whole blocks but for the end of what is visible. first_block: where its blocks
    begin in the run."""

    begin: int
    end: int
    first_block: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin
