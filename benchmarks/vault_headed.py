"""The stages of the training in which records are asked for by the heading that governs them.

A text is a body of sections (vault_sections.py) and behind it a segment of many questions, all of it with plain causal
attention. Losses are taken in the segment, so the last layer is computed for the segment alone.

Most prose may be left out: of a passage only the ends are kept, what follows keeps its position, and the log of how many
tokens each one stands for is added to its score, so that distances and softmax are those of the whole text.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.vault_chunks import DIGIT_WEIGHTS, PROSE_WEIGHT, finish, project
from benchmarks.vault_sections import Layout, Sections
from benchmarks.vault_texts import CODE, FACT, Flags, Ids, Weights

HEADS, SHARED = 6, 3  # query heads, key/value heads


@dataclass(frozen=True)
class HeadedStage:
    """One stage of the training; it begins with the weights of the stage before it."""

    name: str
    steps: int
    rate: float
    rows: int  # texts per step
    tokens: tuple[int, int]  # of a body, at least and at most
    segment: int  # tokens of the question segment
    lengths: tuple[int, int]  # of a section, in tokens
    records: float  # in a section, on average
    same: float  # sections in which a second word stands, on average
    facts: tuple[int, int]  # in a text, at least and at most
    keep: int  # tokens of a passage of prose, at most
    asks: int  # questions in the segment, at most
    jumps: float  # share of texts with jumping positions
    reach: int  # greatest position
    warm_up: int = 20  # steps
    floor: float = 0.05  # of the rate, at the end

    def loss(self, model: Any, sections: Sections, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The loss, and which digits of the questions are right [questions, CODE]."""
        losses, right = zip(*(text_loss(model, text(self, sections, chance)) for _ in range(self.rows)), strict=True)
        return torch.stack(losses).mean(), torch.cat(right)


class HeadedText(NamedTuple):
    """A body and behind it the segment."""

    ids: Ids  # [tokens]
    positions: Ids  # [tokens]
    bias: Weights  # [tokens]; added to the scores of a token
    asked: Flags  # [segment]; which tokens are a question's


def text(stage: HeadedStage, sections: Sections, chance: np.random.Generator) -> HeadedText:
    """What a stage learns from."""
    low, high = (math.log(bound) for bound in stage.tokens)
    tokens = int(math.exp(chance.uniform(low, high)))
    facts = int(chance.integers(stage.facts[0], stage.facts[1] + 1))
    records, same = stage.records * chance.uniform(0.6, 1.4), stage.same * chance.uniform(0.6, 1.4)
    layout = sections.layout(chance, tokens, stage.lengths, records, facts, same)
    known = chance.permutation(np.stack(layout.asked))[: stage.asks]
    segment, asked = sections.strew(chance, stage.segment, known)
    body, positions, bias = thinned(chance, layout, stage.keep)
    if chance.random() < stage.jumps:
        cuts = [np.flatnonzero(body == word)[0] - len(sections.section) for word in chance.choice(layout.words, 3)]
        total = max(0.0, math.exp(chance.uniform(math.log(tokens), math.log(stage.reach))) - tokens)
        for cut, share in zip(cuts, chance.dirichlet([0.7] * 3), strict=True):
            positions[cut:] += int(total * share)
    positions = np.concatenate([positions, positions[-1] + 1 + np.arange(stage.segment)])
    return HeadedText(np.concatenate([body, segment]), positions, np.pad(bias, (0, stage.segment)), asked)


def thinned(chance: np.random.Generator, layout: Layout, keep: int) -> tuple[Ids, Ids, Weights]:
    """Ids, positions and bias of a body of whose prose only the ends are kept."""
    pieces, positions, bias, begin = list[Ids](), list[Ids](), list[Weights](), 0
    for piece, prose in zip(layout.pieces, layout.prose, strict=True):
        where = np.arange(len(piece))
        if prose and len(piece) > keep:
            edge = int(chance.integers(0, keep + 1))
            where = np.concatenate([where[:edge], where[len(piece) - keep + edge :]])
        pieces.append(piece[where])
        positions.append(begin + where)
        bias.append(np.full(len(where), math.log(max(1, len(piece)) / max(1, len(where))), np.float32))
        begin += len(piece)
    return np.concatenate(pieces), np.concatenate(positions), np.concatenate(bias)


def text_loss(model: Any, data: HeadedText) -> tuple[Tensor, Tensor]:
    """The loss of one text, and which digits of its questions are right [questions, CODE]."""
    with torch.autocast("cpu", torch.bfloat16):
        guess = segment_logits(model, data)[0, :-1].float()
    asked = torch.from_numpy(data.asked)
    target = torch.from_numpy(data.ids)[1 - len(asked) :]
    each = functional.cross_entropy(guess, target, reduction="none")
    place = (asked.long().cumsum(0)[1:] - 1) % FACT
    digit = asked[1:] & (place >= FACT - CODE - 1) & (place < FACT - 1)
    codes = (each[digit].view(-1, CODE).mean(0) * torch.tensor(DIGIT_WEIGHTS)).mean()
    right = (guess.argmax(-1) == target)[digit].view(-1, CODE)
    return codes + PROSE_WEIGHT * each[~asked[1:]].mean(), right


def segment_logits(model: Any, data: HeadedText) -> Tensor:
    """Logits [1, segment, vocabulary] of the question segment."""
    body, segment, tokens = model.model, len(data.asked), len(data.ids)
    x = body.embed_tokens(torch.from_numpy(data.ids)[None])
    rope = body.rotary_emb(x, torch.from_numpy(data.positions)[None])
    bias = torch.from_numpy(data.bias).float() + torch.full((tokens, tokens), -torch.inf).triu(1)
    for layer in body.layers:
        q, k, v = project(layer.self_attn, layer.input_layernorm(x), rope)
        group = q.shape[1] // k.shape[1]
        k, v = k.to(v.dtype).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if layer is body.layers[-1]:
            q, x, bias = q[:, :, -segment:], x[:, -segment:], bias[-segment:]
        x = finish(layer, x, functional.scaled_dot_product_attention(q.to(v.dtype), k, v, attn_mask=bias.to(v.dtype)))
    logits: Tensor = model.lm_head(body.norm(x))
    return logits
