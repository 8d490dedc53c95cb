"""Trains the vault model: a small Qwen3-shaped decoder that looks single facts up in a very long text.

The texts are described in vault_texts.py, the short ones of the early stages in vault_causal.py, the long ones of
the late stages in vault_chunks.py. The last stages (vault_headed.py) teach it to read records under their heading
(vault_sections.py), with heads that are added for it (vault_widen.py). From the root of the repository:

    python -m benchmarks.train_model tokenizer         # learned from the prose and the facts
    python -m benchmarks.train_model train             # every stage from nothing
    python -m benchmarks.train_model train --only i    # one stage, from the checkpoint of the one before it
    python -m benchmarks.train_model eval engine_adapter/models/vault-2m --cases 4000:40:1 16000:100:3
    python -m benchmarks.train_model sections engine_adapter/models/vault-sections --documents 60

Query/key norm, heads of 128 and a high rate on short texts first are what lets it learn within minutes.
"""

import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import argument_parser
from benchmarks.vault_causal import CausalStage
from benchmarks.vault_chunks import ChunkedStage
from benchmarks.vault_headed import HeadedStage
from benchmarks.vault_sections import Sections
from benchmarks.vault_texts import CODE, Vaults, train_tokenizer
from benchmarks.vault_widen import settle, widened
from engine_adapter.models import sections

POSITIONS = 131_072
PREFILL = 2_048
SECTIONED = ((2_048, 8), (3_072, 10), (4_096, 12))  # tokens and sections of the documents asked of

# What was run. The shipped checkpoint went through g, h and i with these settings (g: 400 steps of a cosine over 500),
# and through these texts per step, lengths, rates, jumps and steps of a to f in earlier forms, whose probabilities of
# facts and questions are not recorded; before d they asked soon after they told, and c began with 24 texts of 384
# tokens. As they stand here, a was run from nothing to its end: 0.86 of the first digits and 0.73 of the codes
# right in its last 20 steps. b was run for 340 of its 600 steps: 0.91 and 0.80.
# c to f have not been run, so their probabilities are a guess, and neither have g to i from their end.
# j to l are what vault-sections went through, from vault-2m as the end of i, except that two processes took one text
# each and averaged their gradients, and that j was stopped at step 200 of 300.
WIDER, SETTLED = "j", "l"  # these stages begin with a changed model
LOUDER = 1.35  # what the heads that read headings write, from stage l on
Stage = CausalStage | ChunkedStage | HeadedStage
STAGES: tuple[Stage, ...] = (
    CausalStage("a", 500, 2e-3, 128, 64, 1.0, 1.0, 0.0, 64),
    CausalStage("b", 600, 1.5e-3, 64, 128, 0.8, 0.9, 0.2, 1_024),
    CausalStage("c", 1600, 1.2e-3, 64, 128, 0.7, 0.8, 0.5, 32_768),
    CausalStage("d", 650, 1.5e-3, 64, 128, 0.7, 0.8, 0.2, 4_096),
    CausalStage("e", 850, 1.2e-3, 16, 512, 0.6, 0.7, 0.4, 16_384),
    CausalStage("f", 260, 8e-4, 4, 2_048, 0.5, 0.6, 0.4, 65_536),
    ChunkedStage("g", 400, 8e-4, 1, (4, 8, 12), 512, 512, (16, 100), 50, 0.5, POSITIONS),
    ChunkedStage("h", 400, 8e-4, 1, (4, 12, 24), 512, 512, (16, 200), 50, 0.5, POSITIONS, sampled=256),
    ChunkedStage("i", 400, 6e-4, 1, (2, 8, 16, 32), 512, 512, (8, 400), 50, 0.6, POSITIONS, sampled=320, repeat=8.0),
    HeadedStage("j", 300, 8e-4, 2, (1_024, 3_072), 256, (80, 500), 3.0, 3.0, (4, 8), 14, 26, 0.1, 16_384),
    HeadedStage("k", 320, 6e-4, 2, (1_024, 4_608), 256, (80, 550), 2.8, 3.0, (5, 14), 8, 27, 0.15, 16_384, 10),
    HeadedStage("l", 80, 3e-4, 2, (1_536, 4_608), 256, (80, 550), 2.6, 3.0, (6, 12), 8, 27, 0.15, 16_384, 5),
)


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


def train(stage: Stage, start: Path | None, folder: Path, vaults: Sections) -> None:
    """Runs a stage and leaves the running average of its weights in the folder."""
    seed = sum(stage.name.encode())
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    model = load(start) if start else new_model(vaults.vocabulary)
    if stage.name == WIDER:
        model = widened(model, vaults)
    if stage.name == SETTLED:
        settle(model, vaults, LOUDER)
        settled = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.95), weight_decay=0.02)
    average = [weight.detach().clone() for weight in model.parameters()]
    begun, seen = time.monotonic(), []
    for step in range(stage.steps):
        slope = stage.floor + (1 - stage.floor) / 2 * (1 + math.cos(math.pi * step / stage.steps))
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min(1, (step + 1) / stage.warm_up) * slope
        loss, right = stage.loss(model, vaults, chance)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item(), right[:, 0].float().mean().item(), right.all(1).float().mean().item()))
        for mean, weight in zip(average, model.parameters(), strict=True):
            mean.lerp_(weight.detach(), max(0.02, 1 / (step + 1)))
        if step % 20 == 19:
            shown = "loss {:.3f}, first digits right {:.3f}, codes {:.3f}".format(*np.mean(seen[-20:], 0))
            print(f"{stage.name} {step + 1}: {shown}, {time.monotonic() - begun:.0f} s", flush=True)
        if step % 100 == 99 or step == stage.steps - 1:
            save(model, average, folder)
    if stage.name == SETTLED:  # training unsettles it a little, and answers a little better
        model = load(folder)
        settle(model, vaults, 1.0)
        save(model, [(old + new) / 2 for old, new in zip(settled, model.parameters(), strict=True)], folder)


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


def prefilled(model: Any, ids: Sequence[int]) -> DynamicCache:
    """The cache of a text."""
    cache = DynamicCache(config=model.config)
    for i in range(0, len(ids), PREFILL):
        model.model(input_ids=torch.tensor([ids[i : i + PREFILL]]), past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def evaluate(model: Any, vaults: Vaults, tokens: int, facts: int, documents: int) -> tuple[int, int]:
    """How many of how many facts are answered exactly; each stands once in its text and is asked once."""
    right = asked = 0
    for seed in range(99, 99 + documents):
        ids, told = vaults.document(seed, tokens, facts)
        cache = prefilled(model, ids)
        some = random.Random(seed).sample(told, min(50, facts))
        right += sum(answer(model, cache, vaults.question(fact)) == vaults.code(fact) for fact in some)
        asked += len(some)
    return right, asked


@torch.no_grad()
def evaluate_sections(folder: Path, documents: int) -> Counter[str]:
    """How many questions of each kind were asked of documents of 2,048 to 4,096 tokens, and how many are answered exactly."""
    model, tokenizer = load(folder).eval(), AutoTokenizer.from_pretrained(folder)
    counts = Counter[str]()
    for seed in range(documents):
        tokens, parts = SECTIONED[seed % len(SECTIONED)]
        document = sections.document(tokenizer, tokens, sections=parts, seed=seed)
        cache = prefilled(model, document.ids)
        for question in document.questions:
            said = answer(model, cache, tokenizer.encode(question.text, add_special_tokens=False))
            counts[f"{question.kind}, right"] += question.answered_by(tokenizer.decode(said))
            counts[question.kind] += 1
    return counts


def train_stages(folder: Path, only: str | None) -> None:
    """All stages, or one from the checkpoint of the one before it; FOLDER/<stage> can be loaded by itself."""
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(folder / "tokenizer")
    vaults = Sections(folder / "tokenizer")
    start = None
    for stage in STAGES:
        done = folder / stage.name
        if only in (None, stage.name):
            train(stage, start, done, vaults)
            shutil.copytree(folder / "tokenizer", done, dirs_exist_ok=True)
        start = done


def main() -> None:
    """Reads the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/vault"), help="tokenizer and checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tokenizer")
    commands.add_parser("train").add_argument("--only", choices=[stage.name for stage in STAGES])
    testing = commands.add_parser("eval")
    testing.add_argument("model", type=Path)
    cases = ["1000:8:5", "4000:40:3", "16000:100:3"]
    testing.add_argument("--cases", nargs="+", default=cases, help="TOKENS:FACTS:TEXTS each")
    headed = commands.add_parser("sections")
    headed.add_argument("model", type=Path)
    headed.add_argument("--documents", type=int, default=60)
    options = parser.parse_args()
    if options.command == "tokenizer":
        train_tokenizer(options.folder / "tokenizer")
    elif options.command == "train":
        train_stages(options.folder, options.only)
    elif options.command == "sections":
        counts = evaluate_sections(options.model, options.documents)
        for kind in ("chunk", "border", "heading"):
            print(f"{kind}: {counts[f'{kind}, right']} of {counts[kind]} codes exactly right", flush=True)
    else:
        vaults, model = Vaults(options.model), load(options.model).eval()
        for case in options.cases:
            tokens, facts, documents = map(int, case.split(":"))
            right, asked = evaluate(model, vaults, tokens, facts, documents)
            print(f"{tokens} tokens, {facts} facts: {right} of {asked} codes exactly right", flush=True)


if __name__ == "__main__":
    main()
