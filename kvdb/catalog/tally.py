"""The queries of one layer of one session, counted for the segments that it reads."""

from collections.abc import Callable

from kvdb.catalog.segment import Segment, Views
from kvdb.catalog.use import Asked

HAND_ON = 64
"""Queries that are counted before the segments hear of them: counting one costs well under a microsecond."""


class Tally:
    """Counts, and now and then hands on to each segment its share. hand_on: takes a segment and what was asked of it."""

    def __init__(self, views: Views, hand_on: Callable[[Segment, Asked], None]) -> None:
        self._views = views
        self._hand_on = hand_on
        self._tokens = 0
        self._reset()

    def count(self, nanoseconds: int, retrieved: float, tokens: int, searched: bool) -> None:
        """One query over `tokens` tokens, of which it attended `retrieved`. searched: whether an index was asked which."""
        self._queries += 1
        self._nanoseconds += nanoseconds
        self._tokens = tokens
        if searched:
            self._attended += retrieved / tokens
        else:
            self._whole += 1
            self._whole_nanoseconds += nanoseconds
        if self._queries == HAND_ON:
            self.hand_on()

    def hand_on(self) -> None:
        """Now, also of fewer."""
        if self._queries:
            for view in self._views:
                share = view.visible / self._tokens / 1e9
                asked = Asked(
                    queries=self._queries,
                    seconds=self._nanoseconds * share,
                    searches=self._queries - self._whole,
                    attended=self._attended,
                    whole_seconds=self._whole_nanoseconds * share,
                    whole_tokens=self._whole * view.visible,
                )
                self._hand_on(view.segment, asked)
            self._reset()

    def _reset(self) -> None:
        self._queries = self._nanoseconds = self._whole = self._whole_nanoseconds = 0
        self._attended = 0.0
