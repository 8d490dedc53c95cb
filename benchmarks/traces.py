"""Keys, values and queries of the vault model, which kvdb ships, as it reads a document and answers questions about it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvdb
from benchmarks.workloads import BFLOAT16, Workload
from engine_adapter.models import vault
from engine_adapter.transformers import attach
from engine_adapter.transformers.prefill import prefill

FACT_TOKENS = 160
"""Tokens of the document for each fact, as in the model's card."""
PIECE = 1024
SAMPLED_TOKENS = 8192
"""The length of the other document, whose reading gives the samples of queries."""


class Recorder:
    """A session that keeps what goes through it. reused: where the prompt's new tokens begin."""

    def __init__(self, session: kvdb.Session, reused: int) -> None:
        self.spec, self.reused = session.spec, reused
        self._session = session
        self.pieces: list[list[tuple[Any, Any, Any]]] = [[] for _ in range(session.spec.layers)]

    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.pieces[layer].append(tuple(x.to(torch.bfloat16).clone() for x in (q, k, v)))
        return self._session.attend(layer, q, k, v, **options)

    def recorded(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v, `[heads, n, head_dim]`, the bits of bfloat16."""
        q, k, v = (torch.cat(parts, dim=1).view(torch.uint16).numpy() for parts in zip(*self.pieces[layer], strict=True))
        return q, k, v


def record(tokens: int, queries: int = 8, query_samples: int = 256, seed: int = 0, cache: Path | None = None) -> list[Workload]:
    """One workload for each layer of the model, with 4 query heads over 2 KV heads.

    queries: of decode steps behind the document that recall a fact's digits. query_samples: of the reading of another, shorter
    document and of such steps behind it, half each. cache: a folder that keeps what was recorded before.
    """
    name = f"vault-{tokens}-{queries}-{query_samples}-{seed}.npz"
    if cache is not None and (cache / name).exists():
        arrays = dict(np.load(cache / name))
    else:
        arrays = _record(tokens, queries, query_samples, seed)
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            np.savez(cache / name, **arrays)
    layers = len(arrays) // 4
    return [Workload(f"vault-layer-{i}", *_typed([arrays[f"{what}{i}"] for what in "kvqs"])) for i in range(layers)]


def _typed(arrays: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    k, v, q, s = (array.view(BFLOAT16) for array in arrays)
    return k, v, q.astype(np.float32), s.astype(np.float32)


def _record(tokens: int, queries: int, query_samples: int, seed: int) -> dict[str, np.ndarray]:
    model, tokenizer = vault.load()
    with kvdb.connect() as db, attach(model, db) as engine:
        read, steps = _read(model, tokenizer, db, engine.spec, tokens, queries, seed)
        other, sampled = _read(model, tokenizer, db, engine.spec, min(tokens, SAMPLED_TOKENS), query_samples // 2, seed + 1)
    chance = np.random.default_rng(seed)
    arrays = {}
    for layer in range(engine.spec.layers):
        _, arrays[f"k{layer}"], arrays[f"v{layer}"] = read.recorded(layer)
        q = other.recorded(layer)[0]
        chosen = chance.choice(q.shape[1], query_samples - query_samples // 2, replace=False)
        arrays[f"q{layer}"], arrays[f"s{layer}"] = steps[layer], np.concatenate([q[:, chosen], sampled[layer]], axis=1)
    return arrays


def _read(
    model: Any, tokenizer: Any, db: kvdb.Client, spec: kvdb.ModelSpec, tokens: int, queries: int, seed: int
) -> tuple[Recorder, list[np.ndarray]]:
    """What reading a document left, and of each layer `queries` queries `[q_heads, queries, head_dim]` of decode steps behind."""
    document = vault.document(tokenizer, tokens, max(1, tokens // FACT_TOKENS), seed)
    ids = torch.tensor(document.ids)
    with torch.no_grad(), db.create_session(spec, ids) as session:
        reader = Recorder(session, 0)
        prefill(model, reader, ids, PIECE)  # type: ignore[arg-type]  # it asks a session for no more than the recorder has
        steps: list[list[np.ndarray]] = [[] for _ in range(spec.layers)]
        chance = random.Random(seed)
        while sum(part.shape[1] for part in steps[0]) < queries:
            fact = chance.choice(document.facts)
            asked = tokenizer.encode(fact.question, add_special_tokens=False)
            told = tokenizer.encode(fact.sentence, add_special_tokens=False)[: len(asked) + vault.CODE_DIGITS - 1]
            with session.fork() as twin:
                teller = Recorder(twin, len(ids))
                prefill(model, teller, torch.cat([ids, torch.tensor(told)]), PIECE)  # type: ignore[arg-type]
            for layer, kept in enumerate(steps):  # the step of the question's last token recalls the first digit, and so on
                kept.append(teller.recorded(layer)[0][:, len(asked) - 1 :])
    return reader, [np.concatenate(kept, axis=1)[:, :queries] for kept in steps]
