"""The early stages of the vault model's training: plain causal attention over short texts.

Facts are told in the first part of a text, and each is asked at most once in the rest: a model that is asked soon
after it was told learns only short distances. Every token counts in the loss, the digits of an answer the most.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.vault_texts import CODE, FACT, Ids, Vaults, Weights, jumping

BEGIN = 0  # the id of <s>
PROSE_WEIGHT = 0.5
TOLD = np.full(FACT, 0.1, np.float32)  # little can be learned from digits that are told: they are random
DIGIT_WEIGHTS = (8.0, 5.0, 4.0, 4.0, 4.0)  # the first digit decides which fact is read
ASKED = np.array([0.1, 0.1, 0.1, *DIGIT_WEIGHTS, 0.2], np.float32)


@dataclass(frozen=True)
class CausalStage:
    """One stage of the training; it begins with the weights of the stage before it."""

    name: str
    steps: int
    rate: float
    rows: int  # texts per step
    tokens: int  # of a text
    facts: float  # probability that the first part goes on with a fact, not with prose; a text takes 0.15 to 1.1 of it
    asks: float  # probability that the rest goes on with a question, while there is something left to ask
    jumps: float  # share of texts with jumping positions
    reach: int  # greatest position
    warm_up: int = 50  # steps
    floor: float = 0.1  # of the rate, at the end

    def loss(self, model: Any, vaults: Vaults, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The loss, and which digits of the questions are right [questions, CODE]."""
        texts = zip(*(self.text(vaults, chance) for _ in range(self.rows)), strict=True)
        ids, weights = (torch.from_numpy(np.stack(part)) for part in texts)
        reach = [self.reach if chance.random() < self.jumps else self.tokens for _ in range(self.rows)]
        positions = torch.from_numpy(np.stack([jumping(chance, self.tokens, far) for far in reach]))
        with torch.autocast("cpu", torch.bfloat16):
            # Without a cache Transformers may take a jump of the positions for the start of another text.
            logits = model(input_ids=ids[:, :-1], position_ids=positions, use_cache=True).logits
        target, weights = ids[:, 1:], weights[:, 1:]
        each = functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        codes = (weights.unfold(1, CODE, 1) == torch.tensor(DIGIT_WEIGHTS)).all(-1)
        right = (logits.argmax(-1) == target).unfold(1, CODE, 1)[codes]
        return (each * weights).sum() / weights.sum(), right

    def text(self, vaults: Vaults, chance: np.random.Generator) -> tuple[Ids, Weights]:
        """Token ids and what they count in the loss, [tokens + 1]; the last piece is cut off at the end."""
        edge, told = self.tokens * chance.uniform(0.3, 0.75), self.facts * chance.uniform(0.15, 1.1)
        unknown, known = list(vaults.draw(chance, self.tokens // FACT + 1, 0.0)), list[Ids]()
        pieces, weights, length = [np.array([BEGIN])], [np.zeros(1, np.float32)], 1
        while length <= self.tokens:
            if length < edge and chance.random() < told:
                piece, weight = unknown.pop(), TOLD
                known.append(piece)
            elif length >= edge and known and chance.random() < self.asks:
                piece, weight = known.pop(chance.integers(len(known))), ASKED
            else:
                piece = vaults.passage(chance, int(chance.integers(4, 41)))
                weight = np.full(len(piece), PROSE_WEIGHT, np.float32)
            pieces.append(piece)
            weights.append(weight)
            length += len(piece)
        return np.concatenate(pieces)[: self.tokens + 1], np.concatenate(weights)[: self.tokens + 1]
