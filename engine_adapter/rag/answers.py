"""An answer, and how tokens become its text piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from transformers.generation.streamers import BaseStreamer

from engine_adapter.base import Report

HalfCharacter = "\N{REPLACEMENT CHARACTER}"
"""The text that tokenizers make of a token that holds only some bytes of a character."""


class Tokenizer(Protocol):
    """The methods of a tokenizer that are needed, as transformers' have them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Usage:
    """How many tokens and seconds an answer took.

    prompt: tokens of instruction, documents and question, which are reused, recomputed or fresh. reused: tokens whose stored KV
    was taken. recomputed: stored tokens that were computed again because of what stands before them now, a mean over the layers.
    fresh: tokens computed for the first time, such as the question. generated: new tokens. read: the mean number of tokens that a
    step behind the first attended in a layer, None where there was no such step. context: the mean number of tokens that there
    were. first_token_seconds: the time from the call's turn on the model to the first new token. seconds: the time to the last
    one.
    """

    prompt: int
    reused: int
    recomputed: int
    fresh: int
    generated: int
    read: int | None
    context: int
    first_token_seconds: float
    seconds: float

    @property
    def ratio(self) -> float:
        """The share of the stored tokens that was computed again."""
        return self.recomputed / max(self.reused + self.recomputed, 1)

    def __str__(self) -> str:
        read = "" if self.read is None else f", {self.read:,} of {self.context:,} read a step"
        return (
            f"{self.reused:,} tokens reused, {self.recomputed:,} recomputed ({self.ratio:.1%}), {self.fresh:,} fresh, "
            f"{self.generated:,} generated{read}; first token after {self.first_token_seconds * 1000:,.0f} ms"
        )


@dataclass(frozen=True)
class Answer:
    """text: of the new tokens. tokens: their ids. report: of the engine, with the plan (EXPLAIN) in `report.explain`."""

    text: str
    tokens: tuple[int, ...]
    usage: Usage
    report: Report

    def __str__(self) -> str:
        return self.text


class Pieces(BaseStreamer):
    """A streamer of `generate` that hands on each new piece of text as soon as its characters are whole.

    Only a few tokens are decoded at a time, beginning with those of the piece before, which decide whether the next piece begins
    with a space.
    """

    def __init__(self, tokenizer: Tokenizer, give: Callable[[str], Any]) -> None:
        self._tokenizer = tokenizer
        self._give = give
        self._ids: list[int] = []
        self._before = self._given = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """Takes the prompt first, which is no part of the answer, and then token after token."""
        if self._prompt:
            self._prompt = False
            return
        self.add(value.flatten().tolist())

    def add(self, ids: list[int]) -> None:
        self._ids += ids
        text, length = self._text()
        if len(text) > length and not text.endswith(HalfCharacter):
            self._give(text[length:])
            self._before, self._given = self._given, len(self._ids)

    def end(self) -> None:
        """Hands on the rest, half characters too."""
        text, length = self._text()
        if len(text) > length:
            self._give(text[length:])
        self._before = self._given = len(self._ids)

    def _text(self) -> tuple[str, int]:
        """The text from the piece before on, and the length of that piece."""
        ids = self._ids[self._before :]
        known = ids[: self._given - self._before]
        text, before = (str(self._tokenizer.decode(some, skip_special_tokens=True)) for some in (ids, known))
        return text, len(before)


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of an answer's tokens, the same as that of all its pieces."""
    texts: list[str] = []
    pieces = Pieces(tokenizer, texts.append)
    pieces.add(tokens)
    pieces.end()
    return "".join(texts)


def answer_of(tokenizer: Tokenizer, tokens: list[int], prompt: int, report: Report, layers: int) -> Answer:
    """The answer of an engine's call. prompt: the number of its tokens. report: the report of the call, which laid parts out."""
    blend, decode = report.blend, report.decode
    assert blend is not None
    assert report.first_token_seconds is not None
    rows = layers * max(report.generated, 1)
    usage = Usage(
        prompt=prompt,
        reused=round(blend.reused),
        recomputed=round(blend.recomputed),
        fresh=prompt - round(blend.reused) - round(blend.recomputed),
        generated=report.generated,
        read=None if decode is None else round(decode.attended / rows),
        context=prompt if decode is None else round(decode.tokens / rows),
        first_token_seconds=report.first_token_seconds,
        seconds=report.seconds,
    )
    return Answer(text_of(tokenizer, tokens), tuple(tokens), usage, report)
