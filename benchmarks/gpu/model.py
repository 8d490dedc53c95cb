"""A model on the card whose KV cache lives in kvdb: are its answers the processor's, and how soon do they come?

The vault model that the repository ships (`engine_adapter/models/vault-2m`), over a text with facts in it. Plain transformers on
the processor says what is right; plain transformers on the card, with the text in a cache of its own, is compared to.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

import kvdb
from benchmarks.gpu.card import Card
from benchmarks.gpu.overlap import ANY
from benchmarks.gpu.results import Results, Wrong
from kvdb.client.client import Client
from kvdb.config import Config, OptimizerConfig, StorageConfig
from kvdb.database import Database

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine_adapter.demo.plain import PlainReader
    from engine_adapter.models.vault import VaultDocument
    from engine_adapter.transformers import TransformersEngine

LARGE = 16_000, 100, 10, 64
SMALL = 48, 2, 1, 3
"""Tokens of the text, facts in it, questions that are asked, and tokens of a long answer."""
GPU_BYTES, GPU_BYTES_SMALL = 2 << 30, 4 << 20
RIGHT_MIN = 0.9
"""The share of the answers that are right, by the model's card 0.993 at 16,000 tokens."""


@dataclass(frozen=True)
class Asked:
    """Token ids of each answer; and seconds, where they are known: to the first token of each, and a token of the long answer."""

    answers: list[list[int]]
    first: list[float]
    each: float


def run(card: Card, results: Results, seed: int) -> None:
    if importlib.util.find_spec("transformers") is None:
        results.skip("vault", "transformers is not installed")
        return
    from engine_adapter.demo.plain import PlainReader  # behind the look for transformers
    from engine_adapter.models import vault

    tokens, facts, questions, long = SMALL if card.small else LARGE
    model, tokenizer = vault.load()
    document = vault.document(tokenizer, tokens, facts, seed)
    chosen = random.Random(seed).sample(document.facts, questions)
    asked = [tokenizer.encode(fact.question, add_special_tokens=False) for fact in chosen]
    new = 2 if card.small else vault.CODE_DIGITS
    right = plain(PlainReader(model, document.ids, lambda *_: None), asked, new, long)
    torch.nn.Module.to(model, card.device)
    reader = PlainReader(model, document.ids, lambda *_: None)
    beside = plain(reader, asked, new, long)
    with attached(card, model) as engine:
        own = stored(card, engine, document, asked, new, long)
    case = f"vault, {tokens:,} tokens"
    for name, found in (("plain transformers", beside), ("kvdb", own)):
        same = sum(one == other for one, other in zip(found.answers, right.answers, strict=True))
        known = sum(fact.answered_by(str(tokenizer.decode(ids))) for fact, ids in zip(chosen, found.answers, strict=True))
        if name == "kvdb" and not card.small and (same < questions or known < RIGHT_MIN * questions):
            raise Wrong(f"model: {same} of {questions} answers are the processor's, and {known} are right")
        note = f"first token; {same} of {questions} answers are the processor's" + ("" if card.small else f", {known} right")
        if name == "plain transformers" and card.timed:
            note += f"; reading the text took {1e3 * reader.prefill_seconds:.0f} ms, which is not in it"
        results.add(case, name, ms=1e3 * median(found.first), ratio=median(found.first) / median(beside.first), note=note)
        note = f"a token of {long}; {1 / found.each:.0f} tokens a second" if card.timed else f"a token of {long}"
        results.add(case, f"{name}, decoding", ms=1e3 * found.each, ratio=found.each / beside.each, note=note)


def plain(reader: PlainReader, asked: Sequence[list[int]], new: int, long: int) -> Asked:
    """What plain transformers answers."""
    reader.answer(asked[0], new)  # what is slow once
    pairs = [reader.answer(question, new) for question in asked]
    started = perf_counter()
    _, first = reader.answer(asked[0], long)
    each = (perf_counter() - started - first) / (long - 1)
    return Asked([ids for ids, _ in pairs], [seconds for _, seconds in pairs], each)


def stored(
    card: Card, engine: TransformersEngine, document: VaultDocument, asked: Sequence[list[int]], new: int, long: int
) -> Asked:
    """What the model answers over the text that is stored in kvdb."""
    engine.store(name="text", input_ids=torch.tensor([document.ids]))

    def ask(question: list[int], count: int) -> tuple[list[int], float, float]:
        prompt = torch.tensor([document.ids + question], device=card.device)
        lengths: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
        out = engine.generate(prompt, do_sample=False, retrieval=kvdb.Exact(), **lengths)
        report = engine.last
        assert report is not None
        assert report.first_token_seconds is not None
        ids: list[int] = out[0, prompt.shape[1] :].tolist()
        return ids, report.first_token_seconds, (report.seconds - report.first_token_seconds) / max(1, count - 1)

    ask(asked[0], new)  # what is slow once, and a plan that asks for copies
    found = [ask(question, new) for question in asked]
    return Asked([ids for ids, _, _ in found], [first for _, first, _ in found], ask(asked[0], long)[2])


@contextmanager
def attached(card: Card, model: PreTrainedModel) -> Iterator[TransformersEngine]:
    """The model over a database that may have memory of the card."""
    from engine_adapter.transformers import attach

    device = "interpreter" if card.interpreted else "cuda"
    storage = StorageConfig(gpu_bytes_max=GPU_BYTES_SMALL if card.interpreted else GPU_BYTES, gpu_device=device)
    database = Database(Config(storage=storage, optimizer=OptimizerConfig(machine_file="")))
    with Client(database) as client:
        if card.interpreted and database.gpu is not None:
            database.gpu.machine = ANY
        with attach(model, client) as engine:
            yield engine
