"""Are the trained model's answers as right with the optimizer on as with exact attention, and how much faster is its attention?

The vault model, which kvdb ships, reads a document once; then each question is answered in a session of its own, with exact
attention and with what the optimizer chooses when the query names nothing, within the default `error_max`. Timed is every
`Session.attend` of one token, of every layer; `faster_at_last` is over the last quarter of the questions, by when all is proven
that can be. `proven`: the share of the KV heads that a way answers at the end. `ways`: steps by way.
`python -m benchmarks.answers --tokens 65536`; `--help` for fewer questions.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from time import perf_counter
from typing import Any

import torch

import kvdb
from benchmarks.harness import argument_parser, machine, report
from engine_adapter.demo.audits import proven_heads
from engine_adapter.models import vault
from engine_adapter.transformers import attach
from indexes.retrieval import Exact

FACT_TOKENS = 160
"""Tokens of the document for each fact, as in the model's card."""
ANSWER_TOKENS = vault.CODE_DIGITS + 1
KINDS = ("flat", "quantized", "coarse-clusters")
NAME = "document"


class Timed:
    """A database whose sessions note how long each attend of one token takes."""

    def __init__(self, db: kvdb.Client) -> None:
        self._db = db
        self.seconds: list[float] = []

    def create_session(self, *given: Any, **named: Any) -> TimedSession:
        return TimedSession(self._db.create_session(*given, **named), self.seconds)

    def store(self, session: TimedSession, **named: Any) -> kvdb.Context:
        return self._db.store(session.session, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class TimedSession:
    """See `Timed`."""

    def __init__(self, session: kvdb.Session, seconds: list[float]) -> None:
        self.session = session
        self._seconds = seconds

    def attend(self, layer: int, q: Any, *given: Any, **named: Any) -> Any:
        begin = perf_counter()
        out = self.session.attend(layer, q, *given, **named)
        if q.shape[1] == 1:
            self._seconds.append(perf_counter() - begin)
        return out

    def fork(self) -> TimedSession:
        return TimedSession(self.session.fork(), self._seconds)

    def __enter__(self) -> TimedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def run(tokens: int, questions: int, seed: int) -> None:
    """One document."""
    model, tokenizer = vault.load()
    document = vault.document(tokenizer, tokens, max(1, tokens // FACT_TOKENS), seed)
    asked = random.Random(seed).sample(document.facts, min(questions, len(document.facts)))
    ways = {"exact": {"retrieval": Exact()}, "chosen": {}}
    right, seconds, texts = Counter[str](), {}, {}
    rules, used = Counter[str](), Counter[str]()
    with kvdb.connect() as db:
        timed = Timed(db)
        with attach(model, timed) as engine:  # type: ignore[arg-type]  # it asks a database for no more than this one has
            engine.store(name=NAME, input_ids=torch.tensor([document.ids]))
            for kind in KINDS:
                db.build_index(NAME, kind)
            for way, options in ways.items():
                timed.seconds.clear()
                texts[way] = []
                rules.clear()
                used.clear()
                for fact in asked:
                    prompt = torch.tensor([document.ids + tokenizer.encode(fact.question, add_special_tokens=False)])
                    out = engine.generate(
                        prompt,
                        max_new_tokens=ANSWER_TOKENS,
                        min_new_tokens=ANSWER_TOKENS,
                        do_sample=False,
                        inspect=lambda sessions: count(sessions[0].stats(), rules, used),
                        **options,
                    )
                    text = str(tokenizer.decode(out[0, prompt.shape[1] :]))
                    right[way] += fact.answered_by(text)
                    texts[way].append(text)
                seconds[way] = list(timed.seconds)
            proven = sum(map(len, proven_heads(db.explain(NAME)))) / (engine.spec.layers * engine.spec.kv_heads)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    last = {way: statistics.median(values[-len(values) // 4 :]) for way, values in seconds.items()}
    means = {way: statistics.mean(values) for way, values in seconds.items()}
    report(
        "answers",
        tokens=tokens,
        questions=len(asked),
        seed=seed,
        right=dict(right),
        same_text=sum(one == other for one, other in zip(*texts.values(), strict=True)),
        median_ms={way: round(1e3 * value, 3) for way, value in medians.items()},
        mean_ms={way: round(1e3 * value, 3) for way, value in means.items()},
        faster=medians["exact"] / medians["chosen"],
        faster_mean=means["exact"] / means["chosen"],
        faster_at_last=last["exact"] / last["chosen"],
        proven=proven,
        ways=dict(used),
        rules=dict(rules),
    )


def count(stats: kvdb.SessionStats, rules: Counter[str], used: Counter[str]) -> None:
    """Add what a session's rules decided and how its queries were answered."""
    rules.update(stats.rules)
    used.update(stats.ways)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=(32_768, 65_536), help="of the documents")
    parser.add_argument("--questions", type=int, default=100, help="of each document (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report("answers.machine", **machine())
    for tokens in given.tokens:
        run(tokens, given.questions, given.seed)


if __name__ == "__main__":
    main()
