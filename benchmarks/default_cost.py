"""What does the default cost whoever asks for nothing, from the first token of the first question on?

    make real-model && python -m benchmarks.default_cost --tokens 2000 6000 15000 --answers 32 96 300

A context of prose is stored with a pretrained model; then one question after the other is answered over it by the same number of
tokens: exactly, by the default, by the default again (`--again` more times), and exactly. Each has milliseconds a token for each
third of the answer, and how many times as long it took as both exact answers did in the mean. Another context of the same model
is asked by the default at the end (`--contexts 2`). Between two questions somebody reads the answer for `--pause` seconds, in
which indexes are built and proofs made; with 0 there is no time for either but beside steps. Each pair of `--tokens` and
`--answers` has a database of its own, so nothing is proven when it begins.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import torch

import kvdb
from benchmarks.harness import machine, report
from benchmarks.real_model_texts import load, passage
from engine_adapter.models.pretrained import REASON
from engine_adapter.transformers import attach
from kvdb import _native

THIRDS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Clock:
    """When each token of an answer came; the model's `logits_processor` calls it for each."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.at.append(perf_counter())
        return scores

    def thirds(self) -> list[float]:
        """The mean milliseconds a token of each third, from the second token on: the first comes with the question."""
        spent = [1e3 * (after - before) for before, after in pairwise(self.at)]
        edges = [len(spent) * i // THIRDS for i in range(THIRDS + 1)]
        return [statistics.mean(spent[a:b]) for a, b in pairwise(edges)]


def answer(engine: Any, ids: list[int], tokens: int, **options: Any) -> tuple[list[float], dict[str, int]]:
    """Milliseconds a token of each third of an answer, and by which ways its queries were answered."""
    clock, ways = Clock(), dict[str, int]()

    def note(sessions: Any) -> None:
        ways.update(sessions[0].stats().ways)

    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "logits_processor": [clock]}
    engine.generate(torch.tensor([ids]), inspect=note, **how, **options)
    return clock.thirds(), ways


def run(subject: Any, dtype: str, tokens: int, length: int, again: int, contexts: int, pause: float) -> list[dict[str, Any]]:
    """One context of that many tokens, and answers of that length. pause: the seconds between two of them."""
    prose = passage(subject, "novel", tokens, 64 * (again + 3), tokens if contexts > 1 else 1)
    stored = [prose.context, prose.elsewhere[:tokens]][:contexts]
    asked = [("exact", 0), *(("default", 0) for _ in range(again + 1)), ("exact", 0)]
    asked += [("default", number) for number in range(1, contexts) for _ in range(2)]
    lines: list[dict[str, Any]] = []
    with kvdb.connect() as db, attach(subject.model, db) as engine:
        for number, ids in enumerate(stored):
            engine.store(name=f"context {number}", input_ids=torch.tensor([ids]))
        for number, (way, context) in enumerate(asked):
            question = prose.ahead[64 * (number % (again + 3)) :][:24]
            options = {"retrieval": kvdb.Exact()} if way == "exact" else {}
            thirds, ways = answer(engine, stored[context] + question, length, **options)
            lines.append({"way": way, "context": context, "ms": thirds, "ways": ways})
            sleep(pause)
    exact = [[line["ms"][i] for line in lines if line["way"] == "exact"] for i in range(THIRDS)]
    for line in lines:
        times = [ms / statistics.mean(beside) for ms, beside in zip(line["ms"], exact, strict=True)]
        line |= {"dtype": dtype, "tokens": tokens, "answer": length, "pause_s": pause, "times_exact": times}
        report("default_cost", **line)
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """A table of all lines."""
    say = sys.stderr.write
    say("\ndtype     tokens answer context way      ms a token, by thirds     times exact        searched\n")
    for line in lines:
        ways: Any = line["ways"]
        searched = 1 - ways.get("exact", 0) / sum(ways.values()) if ways else 0
        ms = " ".join(f"{one:7.1f}" for one in line["ms"])
        times = " ".join(f"{one:5.2f}" for one in line["times_exact"])
        about = f"{line['dtype']:9} {line['tokens']:6} {line['answer']:6} {line['context']:7} {line['way']:8}"
        say(f"{about} {ms}   {times}  {searched:9.0%}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=(2000, 6000, 15000), help="of the contexts")
    parser.add_argument("--answers", type=int, nargs="+", default=(32, 96, 300), help="tokens of each answer")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--again", type=int, default=1, help="questions by the default after the first")
    parser.add_argument("--contexts", type=int, default=1, choices=(1, 2), help="contexts that are asked")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two questions")
    given = parser.parse_args()
    report("default_cost.machine", **machine(), isa=_native.isa(), threads=_native.threads())
    lines = []
    for dtype in given.dtypes:
        for tokens in given.tokens:
            subject = load("smollm2", tokens + max(given.answers) + 64)
            if subject is None:
                sys.exit(REASON)
            model: Any = subject.model
            model.to(DTYPES[dtype])
            for length in given.answers:
                lines += run(subject, dtype, tokens, length, given.again, given.contexts, given.pause)
    show(lines)


if __name__ == "__main__":
    main()
