"""The sections model: a small decoder, trained for this project, that reads records under the heading that governs them.

Besides facts as in `vault.py`, the text has headings such as " Section amber." and, below them, records such as " Vault same
anchor 4 8 2 1 3.": asked " Vault amber anchor", the model goes on with the five digits. The same second word stands under several
headings, so a record alone answers nothing. That is why chunks have to be blended: a chunk of the text that was computed alone
has not seen its heading. The card, `vault-sections/README.md`, says how often the model is right.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine_adapter.models.vault import CODE_DIGITS, WORDS, load_from, prose_ids
from kvdb.errors import InvalidArgument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "vault-sections"
HEADINGS = tuple((Path(__file__).parent / "headings.txt").read_text().split())
"""Words that stand only in headings; the names of facts and records are made of other words."""
NAMES = tuple(word for word in WORDS if word not in HEADINGS)
FEWEST, MOST = 3, 4
"""The least and the largest number of sections in which a record's second word stands."""
SHORTEST = 32
"""The least tokens of a section."""
SPREAD = 3
"""Records take at most one in this many of a section's tokens."""

Kind = Literal["chunk", "border", "heading"]
"""A fact within one chunk, a fact across the border of two, a record whose heading stands in an earlier chunk."""


@dataclass(frozen=True)
class VaultQuestion:
    """A question for the code of a vault: the text to ask with, the right code, and which tokens of the document tell it."""

    text: str
    code: str
    kind: Kind
    begin: int
    end: int
    heading: int | None
    """The token of the heading's word, for a record."""

    def answered_by(self, text: str) -> bool:
        """Whether every digit is right."""
        return text.replace(" ", "")[:CODE_DIGITS] == self.code


@dataclass(frozen=True)
class SectionsDocument:
    """Token ids of a text, and one question for each fact and record in it, in their order."""

    ids: list[int]
    questions: tuple[VaultQuestion, ...]


def load() -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model, float32 and ready to generate, and its tokenizer. Raises Unsupported where it is not installed."""
    return load_from(FOLDER)


def document(
    tokenizer: "PreTrainedTokenizerBase",
    tokens: int,
    *,
    seed: int,
    sections: int = 8,
    records: int = 24,
    facts: int = 8,
    chunk: int = 128,
) -> SectionsDocument:
    """`tokens` tokens of prose (Python's own documentation) in so many sections, the same for a seed.

    Every second fact lies across a border of chunks if the document is cut every `chunk` tokens; the others lie within a
    chunk, and every record lies in a later chunk than its heading. Raises InvalidArgument if they have no room or no names.
    """
    if not FEWEST <= sections <= len(HEADINGS) or min(records, facts, chunk - 1) < 0 or facts > len(NAMES) ** 2:
        raise InvalidArgument(
            f"{sections} sections, {records} records, {facts} facts, chunks of {chunk} tokens; "
            f"expected {FEWEST} to {len(HEADINGS)} sections, at most {len(NAMES) ** 2} facts, no negative numbers, "
            "and at least 1 token in a chunk"
        )
    return _Draft(tokenizer, tokens, chunk, random.Random(seed)).finish(sections, records, facts)


class _Draft:
    """A document with sentences at their places that is not yet filled with prose."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tokens: int, chunk: int, chance: random.Random) -> None:
        self.tokenizer, self.tokens, self.chunk, self.chance = tokenizer, tokens, chunk, chance
        self.placed: dict[int, list[int]] = {}
        self.taken = [False] * tokens
        self.questions: list[VaultQuestion] = []

    def finish(self, sections: int, records: int, facts: int) -> SectionsDocument:
        bounds = self._bounds(sections)
        names = self.chance.sample(HEADINGS, sections)
        heads = [self._put(begin, self._encode(f" Section {name}.")) - 2 for begin, name in zip(bounds, names, strict=False)]
        first = [self.chunk * (head // self.chunk + 1) for head in heads]
        room = [max(0, (end - begin) // SPREAD // 9) for begin, end in zip(first, bounds[1:], strict=True)]
        words = self.chance.sample(NAMES, min(len(NAMES), records // FEWEST + 1))
        for word in words:
            free = [i for i in range(sections) if room[i]]
            count = min(records, self.chance.randint(FEWEST, MOST), len(free))
            for i in self.chance.sample(free, count):
                room[i] -= 1
                code = self._code()
                begin = self._place(f" Vault same {word} {' '.join(code)}.", first[i], bounds[i + 1])
                self.questions.append(VaultQuestion(f" Vault {names[i]} {word}", code, "heading", begin, begin + 9, heads[i]))
            records -= count
        if records:
            raise InvalidArgument(f"{self.tokens} tokens in {sections} sections have no room for {records} of the records")
        self._facts(facts)
        return SectionsDocument(self._fill(), tuple(sorted(self.questions, key=lambda question: question.begin)))

    def _bounds(self, sections: int) -> list[int]:
        """Where the sections begin, and the end; the longest is at most three times as long as the shortest."""
        shares = [self.chance.uniform(0.5, 1.5) for _ in range(sections)]
        bounds = [int(self.tokens * sum(shares[:i]) / sum(shares)) for i in range(sections)] + [self.tokens]
        if min(end - begin for begin, end in pairwise(bounds)) < SHORTEST:
            raise InvalidArgument(f"{self.tokens} tokens have no room for {sections} sections of {SHORTEST} tokens or more")
        return bounds

    def _facts(self, facts: int) -> None:
        pairs = self.chance.sample(range(len(NAMES) ** 2), facts)
        for i, pair in enumerate(pairs):
            code, text = self._code(), f" Vault {NAMES[pair // len(NAMES)]} {NAMES[pair % len(NAMES)]}"
            kind: Kind = "border" if i % 2 else "chunk"
            begin = self._place(f"{text} {' '.join(code)}.", 0, self.tokens, kind)
            self.questions.append(VaultQuestion(text, code, kind, begin, begin + 9, None))

    def _code(self) -> str:
        return "".join(self.chance.choices("0123456789", k=CODE_DIGITS))

    def _place(self, sentence: str, begin: int, end: int, kind: Kind = "heading") -> int:
        """Put a sentence at a random free place from `begin` to `end` that suits its kind."""
        ids = self._encode(sentence)
        for _ in range(1000):
            place = self.chance.randrange(begin, max(begin, end - len(ids)) + 1)
            across = place // self.chunk != (place + len(ids) - 1) // self.chunk
            fits = kind == "heading" or across == (kind == "border")
            if fits and place + len(ids) <= end and not any(self.taken[place : place + len(ids)]):
                self._put(place, ids)
                return place
        raise InvalidArgument(f"{self.tokens} tokens have no room for {sentence!r}; expected fewer facts, records or sections")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _put(self, begin: int, ids: list[int]) -> int:
        """Put a sentence at a place; returns the place behind it."""
        self.placed[begin] = ids
        self.taken[begin : begin + len(ids)] = [True] * len(ids)
        return begin + len(ids)

    def _fill(self) -> list[int]:
        """The tokens of the whole document, with prose from random places between the sentences."""
        text, ids = prose_ids(self.tokenizer), list[int]()
        for begin in [*sorted(self.placed), self.tokens]:
            gap = begin - len(ids)
            if gap >= len(text):
                raise InvalidArgument(f"{gap} tokens of prose between two sentences; there are {len(text)}")
            start = self.chance.randrange(len(text) - gap)
            ids += [*text[start : start + gap], *self.placed.get(begin, [])]
        return ids
