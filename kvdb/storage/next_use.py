"""When something is expected to be used next, from when it was used before."""

from math import inf


class NextUse:
    """The uses of one layer of a segment, on a clock that counts the uses of all layers.

    A decode step asks for the layers in a circle, and what was used last is needed last: least recently used, and second chance
    with it, would always evict what is asked next. So the time between the last two uses says when the next one is due, as in
    LRU-2 (O'Neil et al., 1993) and LIRS; what was used once is expected last of all, so that a single pass over many layers does
    not displace those that come back.
    """

    __slots__ = ("_interval", "_last", "wanted")

    def __init__(self) -> None:
        self._last: int | None = None
        self._interval: int | None = None
        self.wanted = False
        """Whether it was read ahead and not used since."""

    def used(self, now: int) -> None:
        """Note a use at this time."""
        if self._last is not None:
            self._interval = now - self._last
        self._last, self.wanted = now, False

    def expected(self, now: int) -> tuple[float, int]:
        """The time of the next use, and of the last one, which decides between those that are expected at the same time. What did
        not come when it was due is expected as far ahead as its last use lies behind."""
        if self.wanted:
            return now, now
        if self._last is None or self._interval is None:
            return inf, -1 if self._last is None else self._last
        due = self._last + self._interval
        return max(due, now) if now <= due + self._interval else 2 * now - self._last, self._last
