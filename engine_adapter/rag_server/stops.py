"""Stop sequences in a text that comes piece by piece."""

from collections.abc import Sequence


class StopText:
    """Hands on a text up to the first of some sequences, no part of which comes out.

    found: whether one of them has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What can be handed on now; the rest may be the beginning of a sequence."""
        text = self._held + piece
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if begins:
            self.found, self._held = True, ""
            return text[: min(begins)]
        kept = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a sequence."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
