"""How often are answers right when a document is blended of chunks that were computed alone?

The sections model, which kvdb ships, reads documents of 4,096 tokens, cut every 128. Three kinds of questions: about a fact
within one chunk, about a fact across the border of two, and about a record that means something only under the heading of an
earlier chunk. Each way of blending lays the same chunks out, recomputes, and answers every question of the document in a session
of its own; beside it full prefill, and plain reuse (ratio 0).

    python -m benchmarks.blend_quality > quality.jsonl          # 63 documents, 504 questions of each kind
    python -m benchmarks.blend_quality --plot quality.jsonl     # benchmarks/plots/blend-quality.png
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import kvdb
from benchmarks.blend_plot import draw
from benchmarks.harness import machine, report
from engine_adapter.models import sections
from engine_adapter.models.vault import CODE_DIGITS
from engine_adapter.transformers import TransformersEngine, attach
from engine_adapter.transformers.cache import Row, SessionCache
from engine_adapter.transformers.recompute import recompute
from kvdb.config import IndexConfig, WindowConfig
from query_optimizer.wanted import Wanted

TOKENS, CHUNK_TOKENS = 4_096, 128
KINDS = ("chunk", "border", "heading")
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
OTHER_RATIOS = (0.05, 0.15, 0.3, 0.5, 0.7)
EXACT = Wanted(kvdb.Exact())
DIPR = Wanted(kvdb.Dipr(), hints=kvdb.Hints(index="flat"))
SEARCHED = kvdb.Config(
    window=WindowConfig(sink_tokens=64, recent_tokens=64),
    indexes=IndexConfig(segment_tokens_min=CHUNK_TOKENS, at_store=("flat",)),
)
"""So that chunks this short are searched at all."""
Right = Counter[str]


def answers(model: Any, session: kvdb.Session, questions: Sequence[list[int]], wanted: Wanted) -> list[list[int]]:
    """The digits that the model goes on with behind each question, all of one length; the session is left as it was."""
    said: list[list[int]] = [[] for _ in questions]
    with SessionCache(session.spec, [Row(session.fork()) for _ in questions], session.stats().tokens, wanted) as cache:
        ids = torch.tensor(questions)
        while len(said[0]) < CODE_DIGITS:
            with torch.no_grad():
                logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            for row, token in zip(said, ids[:, 0].tolist(), strict=True):
                row.append(token)
    return said


class Quality:
    """One document after the other, in every way that is compared."""

    def __init__(self, model: Any, tokenizer: Any, seeds: Sequence[int], ways: dict[str, kvdb.Recompute]) -> None:
        self.right: dict[str, Right] = {}
        self.asked: Right = Counter()
        self.seconds: Counter[str] = Counter()
        self._model = model
        self._tokenizer = tokenizer
        self._ways = ways
        for number, seed in enumerate(seeds):
            self._document(seed)
            if number % 10 == 9:
                share = self.right["full"]["heading"] / self.asked["heading"]
                print(f"{number + 1} of {len(seeds)} documents, full prefill {share:.3f} on headings", flush=True, file=_log())

    def _document(self, seed: int) -> None:
        made = sections.document(self._tokenizer, TOKENS, seed=seed, sections=8, records=8, facts=16, chunk=CHUNK_TOKENS)
        ids = torch.tensor(made.ids)
        self.asked.update(question.kind for question in made.questions)
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
        questions: Sequence[sections.Question],
    ) -> None:
        with db.create_session(engine.spec, parts=chunks) as session:
            begin = perf_counter()
            recompute(self._model, session, options)
            self.seconds[way] += perf_counter() - begin
            self._ask(way, session, questions, EXACT)
            if way in {"deviation 0.15", "deviation 0.0"}:
                self._ask(f"{way} dipr", session, questions, DIPR)

    def _ask(self, way: str, session: kvdb.Session, questions: Sequence[sections.Question], wanted: Wanted) -> None:
        right = self.right.setdefault(way, Counter())
        ids = [self._tokenizer.encode(question.text, add_special_tokens=False) for question in questions]
        said = answers(self._model, session, ids, wanted)
        for question, digits in zip(questions, said, strict=True):
            right[question.kind] += question.answered_by(self._tokenizer.decode(digits))


def ways_of(only: str | None) -> dict[str, kvdb.Recompute]:
    """What is compared, by name."""
    ways = {f"deviation {ratio}": kvdb.Recompute(ratio) for ratio in RATIOS}
    for strategy in ("first", "random"):
        ways |= {f"{strategy} {ratio}": kvdb.Recompute(ratio, strategy) for ratio in OTHER_RATIOS}
    for score in ("keys", "values", "both", "absolute", "mean", "head"):
        for steepness in (0.0, 0.3, 0.7, 1.0):
            for spread in (0, 4):
                name = f"score {score} {steepness} {spread} 0.15"
                ways[name] = kvdb.Recompute(0.15, score=score, steepness=steepness, spread=spread)
    chosen = only or "deviation first random"
    return {name: options for name, options in ways.items() if name.split()[0] in chosen.split()}


def _log() -> Any:
    import sys

    return sys.stderr


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--documents", type=int, default=63)
    arguments.add_argument("--ways", help="of deviation, first, random, score; the first three if left out")
    arguments.add_argument("--plot", type=Path, help="draw what a run printed, instead of a run")
    given = arguments.parse_args()
    if given.plot is not None:
        rows = [json.loads(line) for line in given.plot.read_text().splitlines() if line.startswith("{")]
        draw(rows, Path(__file__).parent / "plots" / "blend-quality.png")
        return
    report("blend_quality.machine", torch=torch.__version__, **machine())
    model, tokenizer = sections.load()
    quality = Quality(model, tokenizer, range(1_000, 1_000 + given.documents), ways_of(given.ways))
    for way, right in quality.right.items():
        report(
            "blend_quality",
            way=way,
            documents=given.documents,
            tokens=TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            **{f"{kind}_asked": quality.asked[kind] for kind in KINDS},
            **{kind: right[kind] / max(quality.asked[kind], 1) for kind in KINDS},
            recompute_s=quality.seconds[way] / given.documents,
        )


if __name__ == "__main__":
    main()
