"""How near are a pretrained model's answers over blended documents to those of a full prefill?

SmolLM2-135M-Instruct in float32 (`make real-model` fetches it) reads profiles of countries (`blend_profiles.json`: The World
Factbook, in the public domain) in its own chat format: system prompt, three or four documents, question. 30 questions over 10
mixes, each in an order of its own; `rag.check` at several ratios and at what the controller chooses. A line for each mix as
soon as it is done (`blend_real.mix`), and for all of them at the end (`blend_real`).

    python -m benchmarks.blend_real
    python -m benchmarks.blend_real --mixes 2 --characters 1200 --ratios 0.15
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvdb
from benchmarks.harness import argument_parser, machine, report
from engine_adapter.models.pretrained import REASON, real_model_folder
from engine_adapter.rag import RagEngine
from engine_adapter.rag.check import CheckRow

PROFILES = Path(__file__).with_name("blend_profiles.json")
INSTRUCTION = (
    "<|im_start|>system\nYou are a helpful assistant. You answer questions about the documents that the user gives you, in one "
    "sentence.<|im_end|>\n<|im_start|>user\nDocuments:\n"
)
TEMPLATE = "\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n"
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)
MIXES, QUESTIONS = 10, 3
MEASURES = ("same", "f1", "kl", "nll", "recomputed")
"""What is said of each ratio, as in `rag.check`."""


class Mix(NamedTuple):
    """Documents in their order, by name, and questions about them."""

    names: tuple[str, ...]
    questions: tuple[str, ...]


def mixes(profiles: dict[str, Any], count: int, seed: int = 5) -> list[Mix]:
    """Three or four documents each, in turns; each question is about another of them, and none is asked twice."""
    chance = random.Random(seed)
    left = {name: chance.sample(profile["questions"], len(profile["questions"])) for name, profile in profiles.items()}
    made = []
    for number in range(count):
        most = sorted(left, key=lambda name: (-len(left[name]), chance.random()))
        asked = most[:QUESTIONS]
        names = chance.sample(asked + most[QUESTIONS : QUESTIONS + number % 2], QUESTIONS + number % 2)
        made.append(Mix(tuple(names), tuple(left[name].pop() for name in asked)))
    return made


def shortened(text: str, characters: int | None) -> str:
    """The sentences of a text that end within so many characters; all of it for None."""
    return text if characters is None else text[: text.rfind(".", 0, characters) + 1]


def main() -> None:
    arguments = argument_parser(__doc__)
    arguments.add_argument("--mixes", type=int, default=MIXES)
    arguments.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="beside the chosen one (default %(default)s)")
    arguments.add_argument("--characters", type=int, help="of each document, about; all if left out")
    arguments.add_argument("--tokens", type=int, default=40, help="of an answer, at most")
    given = arguments.parse_args()
    folder = real_model_folder()
    if folder is None:
        print(REASON, file=sys.stderr)
        return
    report("blend_real.machine", torch=torch.__version__, **machine())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    ratios = [*given.ratios, None]
    profiles = json.loads(PROFILES.read_text(encoding="utf-8"))
    chosen = mixes(profiles, given.mixes)
    with kvdb.connect() as db, RagEngine(model, tokenizer, db, instruction=INSTRUCTION, template=TEMPLATE) as rag:
        for name in sorted({name for mix in chosen for name in mix.names}):
            rag.add(name, f"## {name}\n{shortened(profiles[name]['text'], given.characters)}\n")
        tokens = sum(info.tokens for info in rag.documents()) // len(rag.documents())
        columns: list[list[CheckRow]] = []
        for number, mix in enumerate(chosen, 1):
            check = rag.check([(question, mix.names) for question in mix.questions], ratios, max_new_tokens=given.tokens)
            print(f"mix {number} of {len(chosen)}, {tokens} tokens a document\n{check}", file=sys.stderr, flush=True)
            columns.append([*check.rows, check.full])
            tell("blend_real.mix", [columns[-1]], mix=number)
    tell("blend_real", columns, mixes=len(chosen), questions=len(chosen) * QUESTIONS, document_tokens=tokens)


def tell(benchmark: str, columns: list[list[CheckRow]], **known: object) -> None:
    """A line for each ratio, the mean over checks of equally many questions."""
    for rows in zip(*columns, strict=True):
        told = {name: fmean(getattr(row, name) for row in rows) for name in MEASURES}
        ratio = None if rows[0].ratio is None else fmean(row.ratio or 0.0 for row in rows)
        report(benchmark, ratio=ratio, chosen=rows[0].chosen, **known, **told)


if __name__ == "__main__":
    main()
