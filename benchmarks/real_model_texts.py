"""The models and the texts of `benchmarks/real_model.py`: prose with ten facts planted in it, how it goes on, and the questions.

The prose is a novel in the public domain, the project's own documents, or another novel, which was not looked at when the default
of `error_max` was chosen; `make real-model` fetches the novels. Where they are not there, Python's documentation takes their
place, and the text's name says so.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine_adapter.models import pretrained, sections, vault

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEPTHS = 10
"""How many facts are planted, at even distances."""
DOCUMENTS = ("benchmarks/README.md", "ARCHITECTURE.md", "README.md", "CHANGELOG.md")
MODELS = ("smollm2", "vault-2m", "vault-sections")
TEXTS = ("novel", "docs", "unseen")
NOVELS = {"novel": -1, "unseen": 0}
"""Which of the novels a text is: Sense and Sensibility, and Emma."""
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Subject:
    """A model that is measured, its tokenizer, and whether its facts are told as the vault models know them."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vault_facts: bool

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]


@dataclass(frozen=True)
class Question:
    """A planted fact: at which token it stands, the ids that ask for it, and those of the right answer."""

    token: int
    asked: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Passage:
    """context: the ids that are stored. ahead: how the text goes on, which is what is measured. elsewhere: other text of the same
    kind, for queries before those that are measured. questions: one for each planted fact."""

    name: str
    context: list[int]
    ahead: list[int]
    elsewhere: list[int]
    questions: tuple[Question, ...]


def load(name: str, positions: int) -> Subject | None:
    """A model of MODELS in float32, None where it was not fetched. Raises Unsupported where a vault model is not installed.

    positions: how many it must take; a pretrained model that takes fewer has its RoPE scaled by YaRN.
    """
    if name != "smollm2":
        model, tokenizer = vault.load_from({"vault-2m": vault.FOLDER, "vault-sections": sections.FOLDER}[name])
        return Subject(name, model.eval(), tokenizer, vault_facts=True)
    folder = pretrained.real_model_folder()
    if folder is None:
        return None
    config = AutoConfig.from_pretrained(folder)
    trained = config.max_position_embeddings
    if positions > trained:
        factor = float(2 ** math.ceil(math.log2(positions / trained)))
        scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        config.rope_parameters = {**config.rope_parameters, **scaled}
        config.max_position_embeddings = int(factor * trained)
        name = f"{name} x{factor:g}"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return Subject(name, model.eval(), AutoTokenizer.from_pretrained(folder), vault_facts=False)


def passage(subject: Subject, text: str, tokens: int, ahead: int, elsewhere: int) -> Passage:
    """`tokens` tokens of a text with DEPTHS facts in them, and the tokens around; the same every time.

    Raises ValueError where the text is too short.
    """
    name, source = _source(text)
    prose = subject.encode(source)
    chance = random.Random(0)
    planted = [_fact(subject, chance) for _ in range(DEPTHS)]
    context: list[int] = []
    questions = []
    begin = 0
    for i, (sentence, asked, answer) in enumerate(planted):
        room = (tokens - len(context)) // (DEPTHS - i + 0.5) - len(sentence)  # half a piece of prose behind the last fact
        context += prose[begin : begin + int(room)]
        begin += int(room)
        questions.append(Question(len(context), asked, answer))
        context += sentence
    rest = tokens - len(context)
    context += prose[begin : begin + rest]
    begin += rest
    needed = begin + ahead + 1 + elsewhere + 1
    if len(prose) < needed:
        raise ValueError(f"the text {name} has {len(prose):,} tokens of {subject.name}; expected at least {needed:,}")
    return Passage(name, context, prose[begin : begin + ahead + 1], prose[-elsewhere - 1 :], tuple(questions))


def _source(text: str) -> tuple[str, str]:
    """The name of what was found, and its text."""
    if text == "docs":
        return text, "\n\n".join((ROOT / path).read_text(encoding="utf-8") for path in DOCUMENTS)
    novels = pretrained.novels()
    return ("python-docs", vault.prose()) if not novels else (text, novels[NOVELS[text]])


def _fact(subject: Subject, chance: random.Random) -> tuple[list[int], list[int], list[int]]:
    """The ids of a sentence, of the question for its code, and of the code."""
    name = " ".join(chance.sample(vault.WORDS, 2))
    code = "".join(chance.choices("0123456789", k=vault.CODE_DIGITS))
    if subject.vault_facts:
        fact = vault.Fact(name, code)
        sentence, question, answer = fact.sentence, fact.question, "".join(f" {digit}" for digit in code)
    else:
        question, answer = f"\n\nThe secret number of the {name} is", f" {code}"
        sentence = f"{question}{answer}.\n\n"
    return subject.encode(sentence), subject.encode(question), subject.encode(answer)
