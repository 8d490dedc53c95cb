"""The vault model: a small decoder, trained for this project, that looks facts up in a long text.

The text is prose with facts such as " Vault amber anchor 4 8 2 1 3." strewn in; asked " Vault amber anchor", the model goes on
with the five digits. Its card, `vault-2m/README.md`, says how often it is right at which length.
"""

import pydoc_data.topics
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvdb.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "vault-2m"
WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())
CODE_DIGITS = 5
FACT_TOKENS = 10
"""The number of tokens of one fact and some prose before it."""


@dataclass(frozen=True)
class Fact:
    """The code of one vault."""

    vault: str
    code: str

    @property
    def question(self) -> str:
        return f" Vault {self.vault}"

    @property
    def sentence(self) -> str:
        return f"{self.question} {' '.join(self.code)}."

    def answered_by(self, text: str) -> bool:
        """Whether every digit is right."""
        return text.replace(" ", "")[:CODE_DIGITS] == self.code


@dataclass(frozen=True)
class VaultDocument:
    """Token ids of a text, and the facts hidden in it, in their order."""

    ids: list[int]
    facts: tuple[Fact, ...]


def load() -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model, float32 and ready to generate, and its tokenizer. Raises Unsupported where it is not installed."""
    return load_from(FOLDER)


def load_from(folder: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A model of the demo, float32 and ready to generate, and its tokenizer. Raises Unsupported where it is not installed."""
    if not (folder / "model.safetensors").exists():
        raise Unsupported(
            f"the demo's model {folder.name} is not installed; expected it in {folder}: pip install 'kvdb[demo]', "
            "or run the demo in a checkout of the sources"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def document(tokenizer: "PreTrainedTokenizerBase", tokens: int, facts: int, seed: int) -> VaultDocument:
    """`tokens` tokens of prose (Python's own documentation) with `facts` facts at even distances; the same for a seed.

    Raises InvalidArgument for less than one fact, or more than there are names or room for.
    """
    if not 1 <= facts <= len(WORDS) ** 2 or tokens < facts * FACT_TOKENS:
        raise InvalidArgument(
            f"a document of {tokens} tokens cannot hold {facts} facts; expected at least 1 fact and {FACT_TOKENS} tokens for each"
        )
    chance = random.Random(seed)
    text = prose_ids(tokenizer)
    pairs = chance.sample(range(len(WORDS) ** 2), facts)
    vaults = [f"{WORDS[pair // len(WORDS)]} {WORDS[pair % len(WORDS)]}" for pair in pairs]
    hidden = tuple(Fact(vault, "".join(chance.choices("0123456789", k=CODE_DIGITS))) for vault in vaults)
    ids: list[int] = []
    for i, fact in enumerate(hidden):
        sentence = tokenizer.encode(fact.sentence, add_special_tokens=False)
        gap = (tokens - len(ids)) // (facts - i) - len(sentence)
        start = chance.randrange(len(text) - gap)
        ids += [*text[start : start + gap], *sentence]
    return VaultDocument(ids, hidden)


@lru_cache(maxsize=2)
def prose_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The token ids of `prose`, kept for the next document."""
    return tuple(tokenizer.encode(prose(), add_special_tokens=False))


def prose() -> str:
    """Python's own documentation as plain text."""
    text = " ".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return re.sub(r" +", " ", re.sub(r"[^A-Za-z0-9 .,;:()'\-?!]+", " ", text))
