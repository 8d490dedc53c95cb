"""The texts of the vault model: English prose with facts strewn in, and the questions that ask for them.

The prose is derived from the licence texts of Debian (/usr/share/common-licenses) and from the docstrings and
language topics of the Python in use. A fact is " Vault amber anchor 4 8 2 1 3."; asked " Vault amber anchor",
the model has to go on with the five digits.

    vaults = Vaults(Path("engine_adapter/models/vault-2m"))
    ids, facts = vaults.document(seed=1, tokens=16_000, facts=100)
    vaults.question(facts[7]), vaults.code(facts[7])
"""

import glob
import math
import os
import pydoc_data.topics
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float32]

WORDS = tuple(
    re.findall(
        r"\w+",
        """
amber anchor apple arrow autumn badge bamboo banner barrel basil beacon berry birch bishop blossom bridge
bronze bucket butter button cabin cactus camel candle canyon captain carbon carpet castle cedar chalk cherry
circle clover cobalt coffee comet copper coral cotton cradle crane crimson crystal dagger daisy delta desert
diamond dolphin dragon eagle ember emerald engine falcon feather fiddle finch flame flint forest fossil garden
garnet ginger glacier goblet granite guitar hammer harbor harvest hazel helmet heron hollow honey hunter
indigo island ivory jacket jasmine jewel jungle kernel kettle ladder lagoon lantern laurel lemon lily linen
lizard lotus magnet mango maple marble meadow melon mirror monkey mosaic mountain mustard nectar needle nickel
nutmeg oasis ocean olive onyx opal orange orchid otter oyster paddle palace panther paper parrot pearl pebble
pepper pigeon pillow pioneer planet plum pocket poplar poppy prairie pumpkin python quartz quiver rabbit raven
ribbon river robin rocket ruby saddle saffron salmon sandal sapphire saturn scarlet shadow shelter silver
sparrow spider spruce stable summit sunset tango teapot temple thunder tiger timber topaz tulip tunnel turtle
valley velvet violet walnut whale willow window winter wizard yellow zephyr zinc
""",
    )
)
CODE = 5
FACT = CODE + 4  # tokens: " Vault", two words, the digits, a full stop


class Fact(NamedTuple):
    """One vault and its code."""

    first: str
    second: str
    code: str


class Vaults:
    """Prose, facts and questions as token ids."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocabulary = tokenizer.get_vocab_size()
        self.prose = self._ids(tokenizer, corpus())
        self.words = np.array([self._single(tokenizer, " " + word) for word in WORDS])
        self.digits = np.array([self._single(tokenizer, f" {digit}") for digit in range(10)])
        self.vault, self.stop = self._single(tokenizer, " Vault"), self._single(tokenizer, ".")

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> Ids:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def _single(self, tokenizer: Tokenizer, text: str) -> int:
        ids = self._ids(tokenizer, text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens; expected 1")
        return int(ids[0])

    def question(self, fact: Fact) -> list[int]:
        """What is asked: the name of the vault."""
        first, second = WORDS.index(fact.first), WORDS.index(fact.second)
        return [self.vault, int(self.words[first]), int(self.words[second])]

    def code(self, fact: Fact) -> list[int]:
        """What has to be answered, digit by digit."""
        return [int(self.digits[int(digit)]) for digit in fact.code]

    def document(self, seed: int, tokens: int, facts: int) -> tuple[list[int], list[Fact]]:
        """A text of about so many tokens, and the facts that stand in it, each once, evenly strewn."""
        chance = random.Random(seed)
        names = [divmod(name, len(WORDS)) for name in chance.sample(range(len(WORDS) ** 2), facts)]
        told = [Fact(WORDS[a], WORDS[b], "".join(chance.choices("0123456789", k=CODE))) for a, b in names]
        ids: list[int] = []
        gap = tokens // facts - FACT
        for fact in told:
            start = chance.randrange(len(self.prose) - gap)
            ids += self.prose[start : start + gap].tolist()
            ids += [*self.question(fact), *self.code(fact), self.stop]
        return ids, told

    def draw(self, chance: np.random.Generator, count: int, narrow: float) -> Ids:
        """Facts of nine tokens; a narrow share of calls takes few words, so that many facts share one."""
        fewest = max(6, int(math.sqrt(1.6 * count)) + 2)
        pool = len(WORDS)
        if chance.random() < narrow:
            pool = max(fewest, int(math.exp(chance.uniform(math.log(fewest), math.log(pool)))))
        words = self.words[chance.permutation(len(WORDS))[:pool]]
        names = chance.choice(pool**2, count, replace=False)
        codes = self.digits[chance.integers(0, 10, (count, CODE))]
        vault, stop = np.full((count, 1), self.vault), np.full((count, 1), self.stop)
        first, second = words[names // pool, None], words[names % pool, None]
        return np.concatenate([vault, first, second, codes, stop], 1)

    def passage(self, chance: np.random.Generator, tokens: int) -> Ids:
        """So many tokens of prose from a random place."""
        start = chance.integers(0, len(self.prose) - tokens)
        return self.prose[start : start + tokens]

    def strew(self, chance: np.random.Generator, tokens: int, facts: Ids) -> tuple[Ids, Flags]:
        """Exactly so many tokens, the facts at random places among prose; and which tokens are a fact's."""
        free = tokens - facts.size
        cuts = [0, *np.sort(chance.integers(0, free + 1, len(facts))), free]
        pieces: list[Ids] = []
        for i in range(len(cuts) - 1):
            pieces += [self.passage(chance, cuts[i + 1] - cuts[i]), *facts[i : i + 1]]
        ids = np.concatenate(pieces)
        told = np.zeros(tokens, bool)
        for place in np.flatnonzero(ids == self.vault):
            told[place : place + FACT] = True
        return ids, told


def jumping(chance: np.random.Generator, tokens: int, reach: int) -> Ids:
    """Increasing positions with a few jumps, the last of them below reach."""
    gaps = chance.dirichlet([0.5] * chance.integers(2, 13))
    total = math.exp(chance.uniform(math.log(tokens), math.log(max(tokens, reach)))) - tokens
    positions = np.arange(tokens)
    for cut, gap in zip(np.sort(chance.integers(1, tokens, len(gaps) - 1)), gaps, strict=False):
        positions[cut:] += int(gap * total)
    return positions


def corpus() -> str:
    """English prose that every Debian with Python holds."""
    licences = sorted(glob.glob("/usr/share/common-licenses/*"))
    texts = [Path(path).read_text(errors="ignore") for path in licences if os.path.isfile(path)]
    texts += list(pydoc_data.topics.topics.values())
    for path in sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py")):
        texts += re.findall(r'"""(.*?)"""', Path(path).read_text(errors="ignore"), re.DOTALL)
    return re.sub(r" +", " ", re.sub(r"[^A-Za-z0-9 .,;:()'\-?!]+", " ", " ".join(texts)))


def train_tokenizer(folder: Path) -> None:
    """Byte-level BPE in which every word and digit of a fact is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chance = random.Random(0)
    facts = []
    for _ in range(40_000):
        first, second = chance.choice(WORDS), chance.choice(WORDS)
        facts.append(f" Vault {first} {second} {' '.join(chance.choice('0123456789') for _ in range(CODE))}.")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1536, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([corpus(), *facts], trainer)
    whole: Any = PreTrainedTokenizerFast
    whole(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
