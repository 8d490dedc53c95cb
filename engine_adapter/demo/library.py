"""The documents of the RAG demo, and questions about them."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_adapter.models import sections
from engine_adapter.models.sections import VaultQuestion
from kvdb.errors import InvalidArgument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT_TOKENS = 360
"""Mean length of a document; the shortest has about a third of the longest."""


@dataclass(frozen=True)
class Library:
    """documents: token ids by title, which is the word of the heading that each begins with. homes: the title of the document
    that answers each of the questions."""

    documents: dict[str, list[int]]
    questions: tuple[VaultQuestion, ...]
    homes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents.values()))


@dataclass(frozen=True)
class LibraryPrompt:
    """A question, and the titles of the documents that it is asked about, in their order."""

    question: VaultQuestion
    home: str
    titles: tuple[str, ...]

    @property
    def code(self) -> str:
        """The right answer, as the model writes it."""
        return " ".join(self.question.code)


def library(tokenizer: "PreTrainedTokenizerBase", documents: int, seed: int) -> Library:
    """So many documents of prose (Python's own documentation), each below a heading, with two records and some facts.

    The same for a seed. Raises InvalidArgument for more documents than there are headings, or too few.
    """
    if not sections.FEWEST <= documents <= len(sections.HEADINGS):
        raise InvalidArgument(f"{documents} documents; expected {sections.FEWEST} to {len(sections.HEADINGS)}")
    text = sections.document(
        tokenizer, documents * DOCUMENT_TOKENS, seed=seed, sections=documents, records=2 * documents, facts=documents // 2
    )
    begins = _headings(tokenizer, text.ids)
    ends = [*list(begins)[1:], len(text.ids)]
    homes = tuple(begins[max(begin for begin in begins if begin <= question.begin)] for question in text.questions)
    return Library(
        {title: text.ids[begin:end] for (begin, title), end in zip(begins.items(), ends, strict=True)}, text.questions, homes
    )


def prompts(held: Library, questions: int, documents: int, seed: int) -> list[LibraryPrompt]:
    """Different questions, each with the document that answers it among others, in random order.

    Documents that also hold the second word of the question are preferred, as a search for its words would find them.

    Raises InvalidArgument for more questions or documents than there are.
    """
    if not 1 <= questions <= len(held.questions) or not 1 <= documents <= len(held.documents):
        raise InvalidArgument(
            f"{questions} questions about {documents} documents each; expected 1 to {len(held.questions)}, and 1 to "
            f"{len(held.documents)}"
        )
    chance = random.Random(seed)
    made = []
    for number in chance.sample(range(len(held.questions)), questions):
        home = held.homes[number]
        word = held.questions[number].text.split()[-1]
        alike = {title for title, other in zip(held.homes, held.questions, strict=True) if other.text.split()[-1] == word}
        shuffled = chance.sample(list(held.documents), len(held.documents))
        chosen = sorted(shuffled, key=lambda title: (title != home, title not in alike))[:documents]
        made.append(LibraryPrompt(held.questions[number], home, tuple(chance.sample(chosen, documents))))
    return made


def _headings(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> dict[int, str]:
    """The word of each heading by the position where it begins, in ascending order."""
    sentences = {tuple(tokenizer.encode(f" Section {word}.", add_special_tokens=False)): word for word in sections.HEADINGS}
    begins: dict[int, str] = {}
    for length in {len(sentence) for sentence in sentences}:
        for begin in range(len(ids) - length + 1):
            word = sentences.get(tuple(ids[begin : begin + length]))
            if word is not None:
                begins[begin] = word
    return dict(sorted(begins.items()))
