"""Which documents a prompt is made of: marked by the request, or by token ids that open and close each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvdb.blend.strategies import DEFAULT_RATIO, Recompute
from kvdb.errors import InvalidArgument

PARTS = "kvdb_parts"
"""Among a request's `extra_args` or `kv_transfer_params`: `[start, stop]` of each document, in tokens of the prompt."""
RATIO = "kvdb_recompute"
"""Beside it: the share of the documents' tokens that is computed anew."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Marked:
    """The documents of a prompt, as ascending spans `[start, stop)` of its tokens, and the share that is computed anew."""

    spans: tuple[Span, ...]
    ratio: float


@dataclass(frozen=True)
class BlendOptions:
    """What the connector's configuration says of documents.

    opening, closing: the token ids that stand before and behind each document, both empty where only requests mark them. ratio:
    the share of their tokens that is computed anew where a request names none.
    """

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    ratio: float = DEFAULT_RATIO

    @classmethod
    def parse(cls, given: Any) -> "Self | None":
        """The options of `"blend"` in kv_connector_extra_config, None where it is not there. Raises InvalidArgument."""
        if given is None:
            return None
        if not isinstance(given, Mapping) or not given.keys() <= {"open", "close", "recompute"}:
            raise InvalidArgument(f"blend is {given!r}; expected open, close and recompute")
        opening, closing = _ids("open", given.get("open", ())), _ids("close", given.get("close", ()))
        if bool(opening) != bool(closing) or (opening and opening == closing):
            raise InvalidArgument("blend has open or close alone, or both alike; expected two different lists of token ids")
        return cls(opening, closing, _ratio(given.get("recompute", DEFAULT_RATIO)))

    def find(self, tokens: Sequence[int], given: Mapping[str, Any]) -> Marked | None:
        """The documents of a prompt, None for one without. given: what the request says. Raises InvalidArgument for marks that
        do not close, or are not in the prompt."""
        ratio = _ratio(given.get(RATIO, self.ratio))
        spans = _spans(given[PARTS], len(tokens)) if given.get(PARTS) is not None else self._between(tokens)
        return Marked(spans, ratio) if spans else None

    def _between(self, tokens: Sequence[int]) -> tuple[Span, ...]:
        spans: list[Span] = []
        begin: int | None = None
        at = 0
        while self.opening and at < len(tokens):
            if _stands(self.opening, tokens, at):
                if begin is not None:
                    raise InvalidArgument(f"the document that opens before token {begin} is open where another opens, at {at}")
                begin = at = at + len(self.opening)
            elif _stands(self.closing, tokens, at):
                if begin is None:
                    raise InvalidArgument(f"a document closes at token {at}, where none is open")
                if at > begin:
                    spans.append((begin, at))
                begin, at = None, at + len(self.closing)
            else:
                at += 1
        if begin is not None:
            raise InvalidArgument(f"the document that opens before token {begin} does not close")
        return tuple(spans)


def _stands(mark: Sequence[int], tokens: Sequence[int], at: int) -> bool:
    return tokens[at] == mark[0] and list(tokens[at : at + len(mark)]) == list(mark)


def _spans(given: Any, total: int) -> tuple[Span, ...]:
    expected = f"expected a list of [start, stop], ascending, without overlap and in the prompt's {total} tokens"
    if not isinstance(given, list | tuple):
        raise InvalidArgument(f"{PARTS} is {given!r}; {expected}")
    spans, until = [], 0
    for pair in given:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(_is_number(number) for number in pair):
            raise InvalidArgument(f"{PARTS} has {pair!r} in it; {expected}")
        start, stop = pair
        if not until <= start < stop <= total:
            raise InvalidArgument(f"{PARTS} has [{start}, {stop}] behind token {until}; {expected}")
        spans.append((int(start), int(stop)))
        until = stop
    return tuple(spans)


def _ids(what: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list | tuple) or not all(_is_number(token) and token >= 0 for token in given):
        raise InvalidArgument(f"blend.{what} is {given!r}; expected a list of token ids")
    return tuple(given)


def _ratio(given: Any) -> float:
    checked = Recompute.of(given).ratio if given is not None else None
    return DEFAULT_RATIO if checked is None else checked


def _is_number(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)
