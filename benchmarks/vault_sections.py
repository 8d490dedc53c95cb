"""Texts whose records mean something only under their section's heading, and the questions that ask for them.

Prose with facts as in vault_texts.py, and with headings such as " Section amber." every few hundred tokens. Under a
heading stand records, " Vault same anchor 4 8 2 1 3.", whose first word is the heading's: asked " Vault amber anchor",
the model has to go on with the five digits. The same second word stands under several headings, with other digits.

Documents to ask questions of are made by `engine_adapter.models.sections.document`; what stands here is for training.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.vault_texts import CODE, FACT, WORDS, Ids, Vaults
from engine_adapter.models.sections import HEADINGS


class Layout(NamedTuple):
    """Pieces of a text in their order, and what a question for each is; prose and headings have none."""

    pieces: list[Ids]
    prose: list[bool]  # which pieces are
    asked: list[Ids]  # in any order
    words: list[int]  # of the headings

    def add(self, piece: Ids, prose: bool) -> None:
        """Behind the others."""
        self.pieces.append(piece)
        self.prose.append(prose)


class Sections(Vaults):
    """Prose, facts, headings, records and questions as token ids."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = np.isin(WORDS, HEADINGS)
        self.headings, self.names = self.words[known], self.words[~known]
        self.section, self.same = self._ids(tokenizer, " Section"), self._single(tokenizer, " same")

    def heading(self, word: int) -> Ids:
        """The sentence that begins a section."""
        return np.array([*self.section, word, self.stop])

    def codes(self, chance: np.random.Generator, count: int) -> Ids:
        """Random digits [count, CODE]."""
        return self.digits[chance.integers(0, 10, (count, CODE))]

    def sentences(self, first: Ids | int, second: Ids, codes: Ids) -> Ids:
        """Facts or records [count, FACT]."""
        count = len(second)
        columns = [np.full(count, self.vault), np.broadcast_to(first, count), second, *codes.T, np.full(count, self.stop)]
        return np.stack(columns, 1)

    def facts(self, chance: np.random.Generator, count: int, pool: Ids) -> Ids:
        """Facts with different names; half of the second words are from the pool that the records take theirs from."""
        first = chance.choice(self.names, count, replace=False)
        second = np.where(chance.random(count) < 0.5, chance.choice(pool, count), chance.choice(self.names, count))
        return self.sentences(first, second, self.codes(chance, count))

    def layout(
        self, chance: np.random.Generator, tokens: int, lengths: tuple[int, int], records: float, facts: int, same: float
    ) -> Layout:
        """`tokens` tokens in sections of so many, with so many records in each; a second word stands under `same` of them."""
        bounds = [int(chance.integers(0, lengths[0]))]
        while bounds[-1] < tokens - lengths[0] // 2 and len(bounds) <= len(self.headings):
            bounds.append(bounds[-1] + int(chance.integers(lengths[0], lengths[1] + 1)))
        bounds[-1] = tokens
        heads = chance.permutation(self.headings)[: len(bounds) - 1]
        pool = chance.permutation(self.names)[: max(2, round(records * len(heads) / same))]
        told = self.facts(chance, facts, pool)
        home = chance.integers(0, tokens, facts)
        layout = Layout([], [], [], [])
        for i, end in enumerate(bounds):
            begin = bounds[i - 1] if i else 0
            here = told[(home >= begin) & (home < end)]
            asked = here
            room = (end - begin - 6) // FACT - len(here)
            if i:
                layout.words.append(int(heads[i - 1]))
                layout.add(self.heading(int(heads[i - 1])), False)
                count = max(0, min(int(chance.poisson(records)), room, len(pool)))
                codes, second = self.codes(chance, count), chance.permutation(pool)[:count]
                asked = np.concatenate([asked, self.sentences(int(heads[i - 1]), second, codes)])
                here = np.concatenate([here, self.sentences(self.same, second, codes)])
            layout.asked.extend(asked)
            self.spread(chance, layout, end - begin - (len(self.section) + 2) * (i > 0), here)
        return layout

    def spread(self, chance: np.random.Generator, layout: Layout, tokens: int, sentences: Ids) -> None:
        """Adds so many tokens: the sentences in random order and at random places among prose."""
        free = max(0, tokens - sentences.size)
        cuts = [0, *np.sort(chance.integers(0, free + 1, len(sentences))), free]
        order = chance.permutation(sentences)
        for j in range(len(cuts) - 1):
            layout.add(self.passage(chance, cuts[j + 1] - cuts[j]), True)
            for sentence in order[j : j + 1]:
                layout.add(sentence, False)
