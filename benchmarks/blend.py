"""How fast is the first token of a prompt that is blended of stored chunks, and does it stay so?

A Llama of 24 layers with random weights (timing needs no training) reads prompts of chunks in a new order each time:

- ttft: against full prefill, by kvdb and by plain transformers (SDPA), and against a prompt whose prefix is stored; with the
  chunks in memory and on disk, of which the page cache holds nothing.
- orders: 100 prompts, each all of the same 40 documents in an order that was not there before; the last against the first, and
  the bytes that are stored.
- shift: what moving costs a decode step, for each segment and query head: the same views, moved and not.

`python -m benchmarks.blend --help` for fewer tokens or one question only. The quality is in benchmarks/blend_quality.py.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvdb
from benchmarks.harness import argument_parser, machine, measure, report
from engine_adapter.transformers import TransformersEngine, attach
from kvdb.config import StorageConfig

CHUNK_TOKENS = 512
QUESTION_TOKENS = 32
VOCABULARY = 2_048
LAYERS = 24
RATIO = 0.15


def llama(hidden: int, dtype: torch.dtype) -> Any:
    """24 layers, heads of 64, two query heads on each KV head."""
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=65_536,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def texts(count: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """Token ids of documents, int64 `[tokens]` each."""
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (tokens,), generator=chance) for _ in range(count)]


class Corpus:
    """Documents, stored as one chunk each."""

    def __init__(self, engine: TransformersEngine, db: kvdb.Client, count: int, tokens: int, seed: int) -> None:
        self.documents = texts(count, tokens, seed)
        self.question = texts(1, QUESTION_TOKENS, seed + 1)[0]
        self.names = [f"document {seed} {number}" for number in range(count)]
        self.chunks = [engine.store_chunk(name=name, input_ids=ids) for name, ids in zip(self.names, self.documents, strict=True)]
        self._engine = engine
        self._db = db
        self._chance = np.random.default_rng(seed)

    def order(self) -> list[int]:
        """A new order of all documents."""
        return self._chance.permutation(len(self.chunks)).tolist()

    def whole(self, order: Sequence[int]) -> torch.Tensor:
        """The prompt in one piece, `[1, tokens]`."""
        return torch.cat([*(self.documents[number] for number in order), self.question])[None]

    def blended(self, order: Sequence[int], ratio: float) -> float:
        """Seconds to the first token of the prompt as parts."""
        parts = [*(self.chunks[number] for number in order), self.question]
        self._engine.generate(parts=parts, recompute=ratio, max_new_tokens=1, do_sample=False)
        return first_token(self._engine)

    def offload(self) -> None:
        """Move every chunk to disk."""
        for name in self.names:
            self._db.offload(name)


def first_token(engine: TransformersEngine) -> float:
    assert engine.last is not None
    assert engine.last.first_token_seconds is not None
    return engine.last.first_token_seconds


def ttft(model: Any, tokens: int, rounds: int, folder: Path) -> None:
    """Medians of interleaved rounds, each with an order of its own."""
    config = kvdb.Config(storage=StorageConfig(disk_path=str(folder)))
    with kvdb.connect(config=config) as db, attach(model, db) as engine:
        corpus = Corpus(engine, db, tokens // CHUNK_TOKENS, CHUNK_TOKENS, seed=tokens)
        fixed = corpus.order()
        engine.store(name="prefix", input_ids=corpus.whole(fixed)[0, :-QUESTION_TOKENS])
        runs: dict[str, Callable[[list[int]], float]] = {
            "full": lambda order: _full(engine, corpus.whole(order)),
            "full_transformers": lambda order: _plain(model, corpus.whole(order)),
            "prefix": lambda _: _full(engine, corpus.whole(fixed)),
            "blend": lambda order: corpus.blended(order, RATIO),
            "reuse": lambda order: corpus.blended(order, 0.0),
            "blend_from_disk": lambda order: _from_disk(corpus, order, folder),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                taken = run(corpus.order())
                if number:  # the first round warms up
                    seconds[name].append(taken)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        full = min(median["full"], median["full_transformers"])
        report(
            "blend.ttft",
            tokens=tokens,
            chunks=len(corpus.chunks),
            dtype=engine.spec.dtype,
            ratio=RATIO,
            rounds=rounds,
            **{f"{name}_s": value for name, value in median.items()},
            times_faster_than_full=full / median["blend"],
            disk_over_memory=median["blend_from_disk"] / median["blend"],
            controller=str(engine.last.blend.choice) if engine.last and engine.last.blend else "",
        )


def _full(engine: TransformersEngine, prompt: torch.Tensor) -> float:
    engine.generate(prompt, max_new_tokens=1, do_sample=False)
    return first_token(engine)


def _plain(model: Any, prompt: torch.Tensor) -> float:
    begin = perf_counter()
    with torch.no_grad():
        model(prompt, logits_to_keep=1, use_cache=True)
    return perf_counter() - begin


def _from_disk(corpus: Corpus, order: list[int], folder: Path) -> float:
    corpus.offload()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return corpus.blended(order, RATIO)


def orders(model: Any, documents: int, tokens: int, prompts: int) -> None:
    """Prompts of never repeated orders, one after the other."""
    with kvdb.connect() as db, attach(model, db) as engine:
        corpus = Corpus(engine, db, documents, tokens, seed=1)
        full = statistics.median(_full(engine, corpus.whole(corpus.order())) for _ in range(3))
        stored = sum(context.info.nbytes for context in db.contexts())
        seen: set[tuple[int, ...]] = set()
        seconds: list[float] = []
        while len(seconds) < prompts:
            order = corpus.order()
            if tuple(order) not in seen:
                seen.add(tuple(order))
                seconds.append(corpus.blended(order, RATIO))
        first, last = statistics.median(seconds[:10]), statistics.median(seconds[-10:])
        report(
            "blend.orders",
            documents=documents,
            tokens=documents * tokens,
            prompts=prompts,
            full_s=full,
            first_ten_s=first,
            last_ten_s=last,
            last_over_first=last / first,
            times_faster_first=full / first,
            times_faster_last=full / last,
            stored_bytes=stored,
            stored_bytes_after=sum(context.info.nbytes for context in db.contexts()),
        )


def shift(views: int, tokens: int, calls: int) -> None:
    """One decode step over chunks where they were computed against the same chunks moved."""
    spec = kvdb.ModelSpec("shift", 1, 32, 8, 128, rope=kvdb.Rope(theta=5e5))
    chance = np.random.default_rng(0)

    def values(*size: int) -> Any:
        return chance.standard_normal(size, np.float32).astype(spec.numpy_dtype)

    seconds: dict[str, float] = {}
    with kvdb.connect() as db:
        made = [values(2, spec.kv_heads, tokens, spec.head_dim) for _ in range(views)]
        sessions = {}
        for name, moved in (("moved", True), ("unmoved", False)):
            parts = [
                db.import_chunk(spec, [number + moved * views] * tokens, [tuple(kv)], name=f"{name} {number}", base=base)
                for number, kv in enumerate(made)
                for base in [0 if moved else number * tokens]
            ]
            sessions[name] = db.create_session(spec, parts=[*parts, [0]])
            sessions[name].update(0, values(spec.kv_heads, 1, spec.head_dim), values(spec.kv_heads, 1, spec.head_dim))
        q = values(spec.q_heads, 1, spec.head_dim)
        exact = kvdb.Exact()
        seconds = measure(
            {name: lambda one=one: one.attention(0, q, retrieval=exact) for name, one in sessions.items()}, rounds=calls
        )
    extra = seconds["moved"] - seconds["unmoved"]
    report(
        "blend.shift",
        segments=views,
        tokens=views * tokens,
        q_heads=spec.q_heads,
        **{f"{name}_us": value * 1e6 for name, value in seconds.items()},
        us_per_segment_and_head=extra * 1e6 / ((views - 1) * spec.q_heads),
        asked_us=2.0,
    )


def main() -> None:
    arguments = argument_parser(__doc__)
    arguments.add_argument("--only", choices=("ttft", "orders", "shift"))
    arguments.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192, 16_384])
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=100)
    given = arguments.parse_args()
    report("blend.machine", torch=torch.__version__, **machine())
    dtype = getattr(torch, given.dtype)
    if given.only in (None, "shift"):
        shift(40, CHUNK_TOKENS, 51)
    if given.only in (None, "ttft"):
        model = llama(given.hidden, dtype)
        for tokens in given.tokens:
            with tempfile.TemporaryDirectory() as folder:
                ttft(model, tokens, given.rounds, Path(folder))
    if given.only in (None, "orders"):
        orders(llama(256, dtype), 40, 128, given.prompts)


if __name__ == "__main__":
    main()
