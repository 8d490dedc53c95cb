"""Trains the vault model: a small Qwen3-shaped decoder that looks single facts up in a very long text.

The texts are described in vault_texts.py. From the root of the repository:

    python -m benchmarks.train_model tokenizer         # learned from the prose and the facts
    python -m benchmarks.train_model train             # every stage from nothing
    python -m benchmarks.train_model train --only i    # one stage, from the checkpoint of the one before it
    python -m benchmarks.train_model eval engine_adapter/models/vault-2m --cases 4000:40:1 16000:100:3

Only the questions have to see far, so a text is trained as parallel chunks and one segment of many questions:

- A chunk attends causally to itself, and to a few tokens sampled from all those before it. A sampled token
  stands for many: the log of how many is added to its score, so that the softmax is as diluted as in full.
- The question segment attends to all tokens of all chunks. The log of `repeat` may be added to the score of
  prose, which then dilutes the softmax like a text that is up to so many times as long.
- The last layer needs only keys and values of the chunks. Losses are taken in the question segment.
- Positions jump at random, so that distances of up to 131,072 tokens are seen.

What is trained runs with plain full attention. A text of one chunk is plain causal attention here too.
Query/key norm, heads of 128 and a high rate on short texts first are what lets it learn within minutes.
"""

import argparse
import math
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.vault_texts import CODE, Flags, Ids, Vaults, train_tokenizer

DIGIT_WEIGHTS = (1.6, 1.0, 0.8, 0.8, 0.8)
PROSE_WEIGHT = 0.05
POSITIONS = 131_072
PREFILL = 2_048


@dataclass(frozen=True)
class Stage:
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


# The shipped checkpoint went through g, h and i as they stand here (g: 400 steps of a cosine over 500). Its
# stages a to f had these rows, rates, jumps and steps, but were run by an earlier form of this file, in which
# chance put facts into the first part of a text and questions into the rest, and c began with 24 texts of 384
# tokens. In the form below the stages a to f have not been run to their end.
STAGES = (
    Stage("a", 500, 2e-3, 128, (1,), 36, 28, (1, 4), 3, 0.0, 64, 0.0),
    Stage("b", 600, 1.5e-3, 64, (1,), 72, 56, (1, 6), 5, 0.2, 1_024, 0.0),
    Stage("c", 1600, 1.2e-3, 64, (1,), 72, 56, (1, 6), 5, 0.5, 32_768, 0.0),
    Stage("d", 650, 1.5e-3, 64, (1,), 72, 56, (1, 6), 5, 0.2, 4_096, 0.0),
    Stage("e", 850, 1.2e-3, 16, (1,), 288, 224, (2, 16), 16, 0.4, 16_384, 0.0),
    Stage("f", 260, 8e-4, 4, (1,), 1_280, 768, (8, 64), 50, 0.4, 65_536, 0.0),
    Stage("g", 400, 8e-4, 1, (4, 8, 12), 512, 512, (16, 100), 50, 0.5, POSITIONS),
    Stage("h", 400, 8e-4, 1, (4, 12, 24), 512, 512, (16, 200), 50, 0.5, POSITIONS, sampled=256),
    Stage("i", 400, 6e-4, 1, (2, 8, 16, 32), 512, 512, (8, 400), 50, 0.6, POSITIONS, sampled=320, repeat=8.0),
)


class Batch(NamedTuple):
    """Texts as chunks, and their question segments."""

    chunks: Tensor  # [rows, chunks, chunk]
    told: Tensor  # the same; which of these tokens are a fact's
    segment: Tensor  # [rows, segment]
    asked: Tensor  # the same; which of these tokens are a question's
    positions: Tensor  # [rows, chunks * chunk + segment]
    repeat: float


def text(stage: Stage, vaults: Vaults, chance: np.random.Generator, chunks: int) -> tuple[Ids | Flags, ...]:
    """The chunks, which of their tokens are facts', the segment, which of its tokens are questions'."""
    low, high = (math.log(bound) for bound in stage.facts)
    count = min(int(math.exp(chance.uniform(low, high))), chunks * stage.chunk // 10)
    facts, where = vaults.draw(chance, count, stage.narrow), chance.integers(0, chunks, count)
    held = [facts[where == i][: stage.chunk // (CODE + 4)] for i in range(chunks)]
    told = [vaults.strew(chance, stage.chunk, some) for some in held]
    known = chance.permutation(np.concatenate(held))
    segment, asked = vaults.strew(chance, stage.segment, known[: stage.asks])
    return np.stack([ids for ids, _ in told]), np.stack([which for _, which in told]), segment, asked


def jumping(chance: np.random.Generator, tokens: int, reach: int) -> Ids:
    """Increasing positions with a few jumps, the last of them below reach."""
    gaps = chance.dirichlet([0.5] * chance.integers(2, 13))
    total = math.exp(chance.uniform(math.log(tokens), math.log(max(tokens, reach)))) - tokens
    positions = np.arange(tokens)
    for cut, gap in zip(np.sort(chance.integers(1, tokens, len(gaps) - 1)), gaps, strict=False):
        positions[cut:] += int(gap * total)
    return positions


def batch(stage: Stage, vaults: Vaults, chance: np.random.Generator) -> Batch:
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


def losses(logits: Tensor, data: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and the share of questions with all five digits right."""
    target, guess = data.segment[:, 1:], logits[:, :-1].float()
    each = functional.cross_entropy(guess.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    runs = data.asked.long().cumsum(1)[:, 1:]
    digit = data.asked[:, 1:] & ((runs - 1) % (CODE + 4) >= 3) & ((runs - 1) % (CODE + 4) < CODE + 3)
    codes = each[digit].view(-1, CODE)
    weight = torch.tensor(DIGIT_WEIGHTS)
    right = (guess.argmax(-1) == target)[digit].view(-1, CODE).all(1).float().mean()
    return (codes.mean(0) * weight).mean() + PROSE_WEIGHT * each[~data.asked[:, 1:]].mean(), right


def new_model(vocabulary: int) -> Any:
    """Query/key norm and wide heads are what lets it learn within minutes."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=384,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6},
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def train(stage: Stage, start: Path | None, folder: Path, vaults: Vaults) -> None:
    """Runs a stage and leaves the running average of its weights in the folder."""
    seed = sum(stage.name.encode())
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    model = load(start) if start else new_model(vaults.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.95), weight_decay=0.02)
    average = [weight.detach().clone() for weight in model.parameters()]
    begun, seen = time.monotonic(), []
    for step in range(stage.steps):
        slope = 0.05 + 0.475 * (1 + math.cos(math.pi * step / stage.steps))
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min(1, (step + 1) / 40) * slope
        data = batch(stage, vaults, chance)
        with torch.autocast("cpu", torch.bfloat16):
            logits = segment_logits(model, data, stage.sampled, chance)
        loss, right = losses(logits, data)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item(), right.item()))
        for mean, weight in zip(average, model.parameters(), strict=True):
            mean.lerp_(weight.detach(), max(0.02, 1 / (step + 1)))
        if step % 20 == 19:
            shown = "loss {:.3f}, codes right {:.3f}".format(*np.mean(seen[-20:], 0))
            print(f"{stage.name} {step + 1}: {shown}, {time.monotonic() - begun:.0f} s", flush=True)
        if step % 100 == 99 or step == stage.steps - 1:
            save(model, average, folder)


def save(model: Any, weights: Sequence[Tensor], folder: Path) -> None:
    """Writes the model with these weights, rounded to bfloat16, and leaves the model itself as it is."""
    rounded = type(model)(model.config).to(torch.bfloat16)
    for parameter, weight in zip(rounded.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    rounded.save_pretrained(folder)


def load(folder: Path) -> Any:
    """The model in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def answer(model: Any, cache: DynamicCache, question: Sequence[int]) -> list[int]:
    """The digits that the model goes on with, the most probable each time; the cache is left as it was."""
    before, ids, said = cache.get_seq_length(), list(question), list[int]()
    while len(said) < CODE:
        logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
        ids = [int(logits[0, -1].argmax())]
        said += ids
    cache.crop(before - cache.get_seq_length())
    return said


@torch.no_grad()
def evaluate(model: Any, vaults: Vaults, tokens: int, facts: int, documents: int) -> tuple[int, int]:
    """How many of how many facts are answered exactly; each stands once in its text and is asked once."""
    right = asked = 0
    for seed in range(99, 99 + documents):
        ids, told = vaults.document(seed, tokens, facts)
        cache = DynamicCache(config=model.config)
        for i in range(0, len(ids), PREFILL):
            model.model(input_ids=torch.tensor([ids[i : i + PREFILL]]), past_key_values=cache, use_cache=True)
        some = random.Random(seed).sample(told, min(50, facts))
        right += sum(answer(model, cache, vaults.question(fact)) == vaults.code(fact) for fact in some)
        asked += len(some)
    return right, asked


def train_stages(folder: Path, only: str | None) -> None:
    """All stages, or one from the checkpoint of the one before it; FOLDER/<stage> can be loaded by itself."""
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(folder / "tokenizer")
    vaults = Vaults(folder / "tokenizer")
    start = None
    for stage in STAGES:
        done = folder / stage.name
        if only in (None, stage.name):
            train(stage, start, done, vaults)
            shutil.copytree(folder / "tokenizer", done, dirs_exist_ok=True)
        start = done


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/vault"), help="tokenizer and checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tokenizer")
    commands.add_parser("train").add_argument("--only", choices=[stage.name for stage in STAGES])
    testing = commands.add_parser("eval")
    testing.add_argument("model", type=Path)
    cases = ["1000:8:5", "4000:40:3", "16000:100:3"]
    testing.add_argument("--cases", nargs="+", default=cases, help="TOKENS:FACTS:TEXTS each")
    options = parser.parse_args()
    if options.command == "tokenizer":
        train_tokenizer(options.folder / "tokenizer")
    elif options.command == "train":
        train_stages(options.folder, options.only)
    else:
        vaults, model = Vaults(options.model), load(options.model).eval()
        for case in options.cases:
            tokens, facts, documents = map(int, case.split(":"))
            right, asked = evaluate(model, vaults, tokens, facts, documents)
            print(f"{tokens} tokens, {facts} facts: {right} of {asked} codes exactly right", flush=True)


if __name__ == "__main__":
    main()
