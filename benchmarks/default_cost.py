"""What does the default cost whoever asks for nothing, from the first token of the first question on?

    make real-model && python -m benchmarks.default_cost --tokens 2000 6000 15000 --answers 32 96 300

A context of prose is stored with a pretrained model; then one question after the other is answered over it by the same number of
tokens, by the default, and each once more exactly, made to say the same tokens. Each has milliseconds a token for each third of
the answer; the default also how many times as long it took as the exact answers before and behind it did in the mean, by which
ways its queries were answered, and how far its distributions of the next token are from the exact ones (KL, in nats; how many of
the likeliest tokens are equal). Another context of the same model, and a third, are asked at the end (`--contexts 3`). Between
two questions somebody reads the answer for `--pause` seconds, in which indexes are built and proofs made; with 0 there is no time
for either but beside steps. Each pair of `--tokens` and `--answers` has a database of its own, so nothing is proven when it
begins. Of `--repeat` such databases the medians are shown.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import torch

import kvdb
from benchmarks.harness import argument_parser, machine, report
from benchmarks.real_model_texts import load, passage
from engine_adapter.models.pretrained import REASON
from engine_adapter.transformers import attach
from kvdb import _native

THIRDS = 3
Line = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Watch:
    """When each token of an answer came and what the model said of it; the model's `logits_processor` calls it for each. said:
    the tokens that are to be said, None for the likeliest."""

    def __init__(self, said: list[int] | None = None) -> None:
        self.at: list[float] = []
        self.scores: list[torch.Tensor] = []
        self._said = said

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.at.append(perf_counter())
        self.scores.append(scores[0].clone())
        if self._said is None:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[0, self._said[len(self.at) - 1]] = 0
        return forced

    def thirds(self) -> list[float]:
        """The mean milliseconds a token of each third, from the second token on: the first comes with the question."""
        spent = [1e3 * (after - before) for before, after in pairwise(self.at)]
        edges = [len(spent) * i // THIRDS for i in range(THIRDS + 1)]
        return [statistics.mean(spent[a:b]) for a, b in pairwise(edges)]


def distance(exact: Watch, other: Watch) -> dict[str, float]:
    """How far the distributions of an answer are from the exact ones of the same tokens."""
    p, q = (torch.log_softmax(torch.stack(one.scores).double(), -1) for one in (exact, other))
    kl = (p.exp() * (p - q)).nansum(-1)  # what may not be said has no score in either
    same = (p.argmax(-1) == q.argmax(-1)).double()
    return {"kl": float(kl.mean()), "kl_max": float(kl.max()), "likeliest_equal": float(same.mean())}


class Asking:
    """Questions over one database's contexts, and what came of them. ids: of the contexts. ahead: prose of which questions are
    made. length: tokens of an answer. pause: seconds behind each."""

    def __init__(self, engine: Any, ids: list[list[int]], ahead: list[int], length: int, pause: float) -> None:
        self._engine = engine
        self._ids = ids
        self._ahead = ahead
        self._length = length
        self._pause = pause

    def exact(self, context: int, question: int, said: list[int] | None = None) -> Watch:
        return self._ask(context, question, Watch(said), retrieval=kvdb.Exact())[0]

    def compare(self, before: Watch, context: int, question: int) -> tuple[Watch, Line]:
        """A question by the default, and exactly behind it; before: the exact answer before it."""
        ways: dict[str, int] = {}
        default, said = self._ask(context, question, Watch(), inspect=lambda of: ways.update(of[0].stats().ways))
        exact = self.exact(context, question, said)
        beside = [statistics.mean(both) for both in zip(before.thirds(), exact.thirds(), strict=True)]
        times = [ms / one for ms, one in zip(default.thirds(), beside, strict=True)]
        line = {"context": context, "question": question, "ms": default.thirds(), "exact_ms": beside, "times_exact": times}
        return exact, line | {"searched": searched(ways), "ways": ways} | distance(exact, default)

    def _ask(self, context: int, question: int, watch: Watch, **options: Any) -> tuple[Watch, list[int]]:
        ids = self._ids[context] + self._ahead[64 * question :][:24]
        how = {"max_new_tokens": self._length, "min_new_tokens": self._length, "do_sample": False, "logits_processor": [watch]}
        answer = self._engine.generate(torch.tensor([ids]), **how, **options)
        sleep(self._pause)
        return watch, answer[0, -self._length :].tolist()


def searched(ways: dict[str, int]) -> float:
    """The share of a layer's queries in which some head was searched, over all layers."""
    return 1 - ways.get("exact", 0) / sum(ways.values()) if ways else 0.0


def run(subject: Any, tokens: int, length: int, again: int, contexts: int, pause: float) -> list[Line]:
    """Contexts of that many tokens in a new database, and answers of that length."""
    prose = passage(subject, "novel", tokens, 64 * (again + 2), max(contexts - 1, 1) * tokens)
    others = [prose.elsewhere[i * tokens :][:tokens] for i in range(contexts - 1)]
    ids = [prose.context, *others]
    lines: list[Line] = []
    with kvdb.connect() as db, attach(subject.model, db) as engine:
        asking = Asking(engine, ids, prose.ahead, length, pause)
        for context, one in enumerate(ids):
            engine.store(name=f"context {context}", input_ids=torch.tensor([one]))
            before = asking.exact(context, 0)
            for question in range(1, again + 2):
                before, line = asking.compare(before, context, question)
                lines.append(line)
    return lines


def medians(runs: list[list[Line]]) -> list[Line]:
    """The medians of every number of each line of several runs."""
    return [
        {name: _median([one[name] for one in lines]) for name in lines[0] if name != "ways"} for lines in zip(*runs, strict=True)
    ]


def _median(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [statistics.median(one) for one in zip(*values, strict=True)]
    return statistics.median(values)


def show(lines: list[Line]) -> None:
    """A table of all lines."""
    say = sys.stderr.write
    say(
        "\ndtype     tokens answer context question  ms a token, by thirds   exact                   times exact"
        "    searched  KL\n"
    )
    for line in lines:
        ms, exact = (" ".join(f"{one:6.1f}" for one in line[name]) for name in ("ms", "exact_ms"))
        times = " ".join(f"{one:4.2f}" for one in line["times_exact"])
        about = f"{line['dtype']:9} {line['tokens']:6} {line['answer']:6} {line['context']:7.0f} {line['question']:8.0f}"
        say(f"{about}  {ms}   {exact}   {times}  {line['searched']:7.0%}  {line['kl']:.1e}\n")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=(2000, 6000, 15000), help="of the contexts")
    parser.add_argument("--answers", type=int, nargs="+", default=(32, 96, 300), help="tokens of each answer")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--again", type=int, default=1, help="questions by the default after the first, of each context")
    parser.add_argument("--contexts", type=int, default=1, help="contexts that are asked, one after the other")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two questions")
    parser.add_argument("--repeat", type=int, default=1, help="databases of each kind")
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
                asked = tokens, length, given.again, given.contexts, given.pause
                runs = [run(subject, *asked) for _ in range(given.repeat)]
                about = {"dtype": dtype, "tokens": tokens, "answer": length, "pause_s": given.pause, "repeat": given.repeat}
                lines += [about | line for line in medians(runs)]
                for line in lines[-len(runs[0]) :]:
                    report("default_cost", **line)
    show(lines)


if __name__ == "__main__":
    main()
