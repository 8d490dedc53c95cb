"""The late stages of the vault model's training: only the questions see the whole of a long text.

A text is trained as parallel chunks and one segment of many questions:

- A chunk attends causally to itself, and to a few tokens sampled from all those before it. A sampled token
  stands for many: the log of how many is added to its score, so that the softmax is as diluted as in full.
- The question segment attends to all tokens of all chunks. The log of `repeat` may be added to the score of
  prose, which then dilutes the softmax like a text that is up to so many times as long.
- The last layer needs only keys and values of the chunks. Losses are taken in the question segment.
- Positions jump at random, so that distances of up to 131,072 tokens are seen.

What is trained runs with plain full attention.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.vault_texts import CODE, FACT, Flags, Ids, Vaults, jumping

DIGIT_WEIGHTS = (1.6, 1.0, 0.8, 0.8, 0.8)  # the first digit decides which fact is read
PROSE_WEIGHT = 0.05


@dataclass(frozen=True)
class ChunkedStage:
    """One stage of the training; it begins with the weights of the stage before it."""

    name: str
    steps: int
    rate: float
    rows: int  # texts per step
    chunks: tuple[int, ...]  # one of these many chunks per text
    chunk: int  # tokens of a chunk
    segment: int  # tokens of the question segment
    facts: tuple[int, int]  # told in one text, at least and at most
    asks: int  # questions in the segment, at most
    jumps: float  # share of texts with jumping positions
    reach: int  # greatest position
    narrow: float = 0.6  # share of texts whose facts are drawn from few words
    sampled: int = 0  # earlier tokens that a chunk attends to; if 0, only to itself
    repeat: float = 1.0  # prose counts up to so many times
    warm_up: int = 40  # steps
    floor: float = 0.05  # of the rate, at the end

    def loss(self, model: Any, vaults: Vaults, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The loss, and which digits of the questions are right [questions, CODE]."""
        data = batch(self, vaults, chance)
        with torch.autocast("cpu", torch.bfloat16):
            logits = segment_logits(model, data, self.sampled, chance)
        target, guess = data.segment[:, 1:], logits[:, :-1].float()
        each = functional.cross_entropy(guess.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        place = (data.asked.long().cumsum(1)[:, 1:] - 1) % FACT
        digit = data.asked[:, 1:] & (place >= FACT - CODE - 1) & (place < FACT - 1)
        codes = (each[digit].view(-1, CODE).mean(0) * torch.tensor(DIGIT_WEIGHTS)).mean()
        right = (guess.argmax(-1) == target)[digit].view(-1, CODE)
        return codes + PROSE_WEIGHT * each[~data.asked[:, 1:]].mean(), right


class Batch(NamedTuple):
    """Texts as chunks, and their question segments."""

    chunks: Tensor  # [rows, chunks, chunk]
    told: Tensor  # the same; which of these tokens are a fact's
    segment: Tensor  # [rows, segment]
    asked: Tensor  # the same; which of these tokens are a question's
    positions: Tensor  # [rows, chunks * chunk + segment]
    repeat: float


def text(stage: ChunkedStage, vaults: Vaults, chance: np.random.Generator, chunks: int) -> tuple[Ids | Flags, ...]:
    """The chunks, which of their tokens are facts', the segment, which of its tokens are questions'."""
    low, high = (math.log(bound) for bound in stage.facts)
    count = min(int(math.exp(chance.uniform(low, high))), chunks * stage.chunk // 10)
    facts, where = vaults.draw(chance, count, stage.narrow), chance.integers(0, chunks, count)
    held = [facts[where == i][: stage.chunk // FACT] for i in range(chunks)]
    told = [vaults.strew(chance, stage.chunk, some) for some in held]
    known = chance.permutation(np.concatenate(held))
    segment, asked = vaults.strew(chance, stage.segment, known[: stage.asks])
    return np.stack([ids for ids, _ in told]), np.stack([which for _, which in told]), segment, asked


def batch(stage: ChunkedStage, vaults: Vaults, chance: np.random.Generator) -> Batch:
    """What one step learns from."""
    chunks = int(chance.choice(stage.chunks))
    texts = zip(*(text(stage, vaults, chance, chunks) for _ in range(stage.rows)), strict=True)
    parts = [torch.from_numpy(np.stack(part)) for part in texts]
    tokens = chunks * stage.chunk + stage.segment
    reach = [stage.reach if chance.random() < stage.jumps else tokens for _ in range(stage.rows)]
    positions = torch.from_numpy(np.stack([jumping(chance, tokens, far) for far in reach]))
    repeat = math.exp(chance.uniform(0, math.log(stage.repeat))) if chance.random() < 0.8 else 1.0
    return Batch(parts[0], parts[1], parts[2], parts[3], positions, repeat)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention in float32 with grouped heads; causal where no bias is given."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    return functional.scaled_dot_product_attention(q.float(), k, v, attn_mask=bias, is_causal=bias is None)


def project(attention: Any, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [rows, heads, tokens, head_dim]."""
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(x).view(shape).float()).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(shape).float()).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *rope)
    return q, k, attention.v_proj(x).view(shape).transpose(1, 2)


def finish(layer: Any, x: Tensor, out: Tensor) -> Tensor:
    """The layer's output from its input and what attention gave."""
    x = x + layer.self_attn.o_proj(out.transpose(1, 2).reshape(*x.shape[:-1], -1))
    whole: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return whole


class Sampled:
    """Which earlier tokens a chunk attends to, and what is added to the scores."""

    def __init__(self, chance: np.random.Generator, size: torch.Size, count: int, prose: Tensor) -> None:
        rows, chunks, chunk = size
        earlier = chunk * np.arange(chunks)
        self.which = torch.from_numpy((chance.random((chunks, count)) * earlier[:, None]).astype(np.int64))
        share = torch.log(torch.from_numpy(earlier / count)).float()  # minus infinity for the first chunk
        bias = torch.full((chunk, chunk), -torch.inf).triu(1).expand(rows, chunks, 1, chunk, chunk)
        weight = (share[:, None] + prose[:, self.which])[:, :, None, None].expand(-1, -1, 1, chunk, -1)
        self.bias = torch.cat([weight, bias], -1).flatten(0, 1)

    def __call__(self, flat: Tensor, own: Tensor) -> Tensor:
        """Before each chunk's own keys or values [rows * chunks, ...] the sampled ones of the whole text."""
        return torch.cat([flat[:, :, self.which].transpose(1, 2).flatten(0, 1), own], 2)


def segment_logits(model: Any, data: Batch, sampled: int, chance: np.random.Generator) -> Tensor:
    """Logits [rows, segment, vocabulary] of the question segments."""
    rows, chunks, chunk = data.chunks.shape
    body, length, tokens = model.model, data.segment.shape[1], chunks * chunk
    x, y = body.embed_tokens(data.chunks.flatten(0, 1)), body.embed_tokens(data.segment)
    near = body.rotary_emb(x, data.positions[:, :tokens].reshape(rows * chunks, chunk))
    far = body.rotary_emb(y, data.positions[:, tokens:])
    prose = math.log(data.repeat) * (~data.told).flatten(1).float()
    causal = torch.full((length, length), -torch.inf).triu(1).expand(rows, 1, -1, -1)
    bias = torch.cat([prose[:, None, None].expand(-1, 1, length, -1), causal], -1)
    sample = Sampled(chance, data.chunks.shape, sampled, prose) if sampled else None

    def flat(z: Tensor) -> Tensor:
        return z.view(rows, chunks, *z.shape[1:]).transpose(1, 2).flatten(2, 3)

    for layer in body.layers:
        q, k, v = project(layer.self_attn, layer.input_layernorm(x), near)
        asking, own_k, own_v = project(layer.self_attn, layer.input_layernorm(y), far)
        keys, values = flat(k), flat(v)
        y = finish(layer, y, attend(asking, torch.cat([keys, own_k], 2), torch.cat([values, own_v], 2), bias))
        if layer is not body.layers[-1]:
            out = attend(q, sample(keys, k), sample(values, v), sample.bias) if sample else attend(q, k, v)
            x = finish(layer, x, out)
    logits: Tensor = model.lm_head(body.norm(y))
    return logits
