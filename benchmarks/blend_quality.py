"""How often are answers right when a document is blended of chunks that were computed alone?

The sections model, which kvdb ships, reads documents of 4,096 tokens, cut every 128. Three kinds of questions: about a fact
within one chunk, about a fact across the border of two, and about a record that means something only under the heading of an
earlier chunk. Each way of blending lays the same chunks out, recomputes, and answers every question of the document in a session
of its own; beside it full prefill, and plain reuse (ratio 0).

    python -m benchmarks.blend_quality > quality.jsonl          # 63 documents, 504 questions of each kind
    python -m benchmarks.blend_quality --plot quality.jsonl     # benchmarks/plots/blend-quality.png
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import kvdb
from benchmarks.blend_plot import draw
from benchmarks.blend_strategies import First, Random
from benchmarks.harness import argument_parser, machine, report
from engine_adapter.models import sections
from engine_adapter.models.vault import CODE_DIGITS
from engine_adapter.transformers import TransformersEngine, attach
from engine_adapter.transformers.cache import Row, SessionCache
from engine_adapter.transformers.recompute import recompute
from kvdb.config import IndexConfig, WindowConfig
from query_optimizer.query_options import QueryOptions

TOKENS, CHUNK_TOKENS = 4_096, 128
FIRST_SEED = 1_000
KINDS = ("chunk", "border", "heading")
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
OTHER_RATIOS = (0.05, 0.15, 0.3, 0.5)
DIPR_TOO = ("deviation 0.15", "deviation 0.0")
EXACT = QueryOptions(kvdb.Exact())
DIPR = QueryOptions(kvdb.Dipr(), hints=kvdb.Hints(index="flat"))
SEARCHED = kvdb.Config(
    window=WindowConfig(sink_tokens=64, recent_tokens=64),
    indexes=IndexConfig(segment_tokens_min=CHUNK_TOKENS, at_store=("flat",)),
)
"""So that chunks this short are searched at all."""
Right = Counter[str]


def answers(model: Any, session: kvdb.Session, questions: Sequence[list[int]], options: QueryOptions) -> list[list[int]]:
    """The digits that the model goes on with behind each question, all of one length; the session is left as it was."""
    said: list[list[int]] = [[] for _ in questions]
    with SessionCache(session.spec, [Row(session.fork()) for _ in questions], session.stats().tokens, options) as cache:
        ids = torch.tensor(questions)
        while len(said[0]) < CODE_DIGITS:
            with torch.no_grad():
                logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            for row, token in zip(said, ids[:, 0].tolist(), strict=True):
                row.append(token)
    return said


class Counts(NamedTuple):
    """right: answers, by way and kind; asked: questions, by kind; seconds: of recomputing, by way."""

    right: dict[str, Right]
    asked: Right
    seconds: Counter[str]

    def add(self, other: Counts) -> None:
        for way, right in other.right.items():
            self.right.setdefault(way, Counter()).update(right)
        self.asked.update(other.asked)
        self.seconds.update(other.seconds)


class Quality:
    """Documents in every way that is compared."""

    def __init__(self, ways: dict[str, kvdb.Recompute]) -> None:
        self.counts = Counts({}, Counter(), Counter())
        self._model, self._tokenizer = sections.load()
        self._ways = ways

    def document(self, seed: int) -> None:
        """Count one more."""
        made = sections.document(self._tokenizer, TOKENS, seed=seed, sections=8, records=8, facts=16, chunk=CHUNK_TOKENS)
        ids = torch.tensor(made.ids)
        self.counts.asked.update(question.kind for question in made.questions)
        with kvdb.connect(config=SEARCHED) as db, attach(self._model, db) as engine:
            engine.store(name="whole", input_ids=ids)
            with db.create_session(engine.spec, ids) as whole:
                self._ask("full", whole, made.questions, EXACT)
                self._ask("full dipr", whole, made.questions, DIPR)
            chunks = [
                engine.store_chunk(name=str(at), input_ids=ids[at : at + CHUNK_TOKENS]) for at in range(0, TOKENS, CHUNK_TOKENS)
            ]
            for way, options in self._ways.items():
                self._blend(way, engine, db, chunks, options, made.questions)

    def _blend(  # one way of one document
        self,
        way: str,
        engine: TransformersEngine,
        db: kvdb.Client,
        chunks: Sequence[kvdb.Context],
        options: kvdb.Recompute,
        questions: Sequence[sections.VaultQuestion],
    ) -> None:
        with db.create_session(engine.spec, parts=chunks) as session:
            begin = perf_counter()
            recompute(self._model, session, options)
            self.counts.seconds[way] += perf_counter() - begin
            self._ask(way, session, questions, EXACT)
            if way in DIPR_TOO:
                self._ask(f"{way} dipr", session, questions, DIPR)

    def _ask(self, way: str, session: kvdb.Session, questions: Sequence[sections.VaultQuestion], options: QueryOptions) -> None:
        right = self.counts.right.setdefault(way, Counter())
        ids = [self._tokenizer.encode(question.text, add_special_tokens=False) for question in questions]
        said = answers(self._model, session, ids, options)
        for question, digits in zip(questions, said, strict=True):
            right[question.kind] += question.answered_by(self._tokenizer.decode(digits))


def ways_of(only: str | None) -> dict[str, kvdb.Recompute]:
    """The ways of blending that are compared, by name."""
    ways = {f"deviation {ratio}": kvdb.Recompute(ratio) for ratio in RATIOS}
    for name, strategy in (("first", First), ("random", Random)):
        ways |= {f"{name} {ratio}": kvdb.Recompute(ratio, strategy=strategy) for ratio in OTHER_RATIOS}
    chosen = (only or "deviation first random").split()
    return {name: options for name, options in ways.items() if name.split()[0] in chosen}


def of_documents(seeds: Sequence[int], ways: dict[str, kvdb.Recompute]) -> Counts:
    """In a process of its own, on one core: matrices this small are not faster on two."""
    torch.set_num_threads(1)
    quality = Quality(ways)
    for seed in seeds:
        quality.document(seed)
    return quality.counts


def main() -> None:
    arguments = argument_parser(__doc__)
    arguments.add_argument("--documents", type=int, default=63)
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--ways", help="some of deviation, first, random; all if left out")
    arguments.add_argument("--plot", type=Path, help="draw what a run printed, instead of a run")
    given = arguments.parse_args()
    if given.plot is not None:
        rows = [json.loads(line) for line in given.plot.read_text().splitlines() if line.startswith("{")]
        draw(rows, Path(__file__).parent / "plots" / "blend-quality.png")
        return
    report("blend_quality.machine", torch=torch.__version__, **machine())
    counts = Counts({}, Counter(), Counter())
    os.environ["KVDB_THREADS"] = "1"  # of the processes that follow
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        ways, seeds = ways_of(given.ways), range(FIRST_SEED, FIRST_SEED + given.documents)
        for done, some in enumerate(pool.map(of_documents, ([seed] for seed in seeds), repeat(ways)), 1):
            counts.add(some)
            print(f"{done} of {given.documents} documents", file=sys.stderr, flush=True)
    for way, right in counts.right.items():
        report(
            "blend_quality",
            way=way,
            documents=given.documents,
            tokens=TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            **{f"{kind}_asked": counts.asked[kind] for kind in KINDS},
            **{kind: right[kind] / max(counts.asked[kind], 1) for kind in KINDS},
            recompute_s=counts.seconds[way] / given.documents,
        )


if __name__ == "__main__":
    main()
