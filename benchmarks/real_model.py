"""What do the ways of answering do to a model that others trained, and what do they read?

    make real-model && python -m benchmarks.real_model --quick
    python -m benchmarks.real_model --tokens 4096 --steps 512 --also RUN.jsonl > NEXT.jsonl

A context of prose with ten planted facts is stored; then the text goes on, teacher-forced, in one session for each way of
answering, all over the same stored context: exact attention, which is the reference, `error_max`, DIPR on each kind of index,
top-k, top-p, a bound on the missed mass, the largest weights beside an estimate of the rest, and noise of a known size. Compared
are the logits of each step. Ways that stand on evidence first answer `--proof` steps over other text, in a session that is
closed. At the end each way is asked for the ten facts. One JSON line for each way, one table, one picture. `--cache` keeps the KV
of contexts; `--also` takes the lines of earlier runs and runs only what they do not hold. `--at-any-price` runs budgets alone,
and has them use every way that is proven, also where it saves no time: what they err then is the most that they may, on any
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks import real_model_table
from benchmarks.harness import argument_parser, machine, report
from benchmarks.real_model_contexts import Databases, keys_and_values, say
from benchmarks.real_model_steps import EachItsOwn, Measured, answered, compare, logits_of
from benchmarks.real_model_texts import MODELS, TEXTS, Passage, Subject, load, passage
from benchmarks.real_model_ways import EXACT, Way, at_any_price, free_audits, ways
from engine_adapter.base import DecodeStats
from engine_adapter.models.pretrained import REASON
from engine_adapter.transformers import attach
from engine_adapter.transformers.cache import Row
from engine_adapter.transformers.decode_stats import counters_of, decode_stats
from kvdb import _native
from kvdb.config import Config, IndexConfig, OptimizerConfig
from kvdb.types import SessionStats

TOKENS = (2048, 4096, 8192)
STEPS, PROOF, ROWS = 256, 768, 12
ERROR_STEPS = 8
"""Every so many steps the error of each layer's output is measured too."""
CONFIG = Config(indexes=IndexConfig(segment_tokens_min=1024))
"""So that contexts of 2,048 tokens are searched too; otherwise kvdb's own settings."""
AT_ANY_PRICE = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(rules_off=("short_context",)))
"""So that contexts are searched however little that saves."""
Line = dict[str, object]


def main() -> None:
    given = arguments()
    report("real_model.machine", **machine(), isa=_native.isa(), threads=_native.threads())
    known = [json.loads(line) for path in given.also for line in path.read_text().splitlines()]
    lines: list[Line] = [line for line in known if line["benchmark"] == "real_model"]
    for name in given.models:
        for tokens in given.tokens:
            subject = load(name, tokens)
            if subject is None:
                say(REASON)
                continue
            with at_any_price() if given.at_any_price else nullcontext():
                for text in given.texts:
                    lines += point(subject, text, tokens, given, lines)
    real_model_table.show(lines, sys.stderr)
    if given.plots is not None and lines:
        from benchmarks import real_model_plot  # needs matplotlib, which only a benchmark does

        real_model_plot.draw(lines, given.plots / "real-model.png")


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of the stored contexts (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are measured of each (default %(default)s)")
    parser.add_argument("--proof", type=int, default=PROOF, help="steps before, for ways that stand on evidence")
    parser.add_argument("--rows", type=int, default=ROWS, help="ways that run together (default %(default)s)")
    parser.add_argument("--ways", nargs="+", metavar="FAMILY", help="only ways whose names begin with one of these")
    parser.add_argument("--at-any-price", action="store_true", help="budgets alone, which use every way that is proven")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the KV of contexts")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="lines of earlier runs")
    parser.add_argument("--plots", type=Path, help="folder for the plot")
    parser.add_argument("--no-facts", dest="facts", action="store_false", help="do not ask for the planted facts")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, few ways, few steps")
    given = parser.parse_args()
    if given.quick:
        given.tokens, given.texts, given.steps, given.proof = [2048], TEXTS[:1], 32, 64
    return given


def point(subject: Subject, text: str, tokens: int, given: argparse.Namespace, known: list[Line]) -> list[Line]:
    """Every way on one stored context. A context that fills all positions of the model is shortened by the steps behind it."""
    positions = int(subject.model.config.max_position_embeddings)
    told = min(tokens, positions - max(given.steps, given.proof) - 1)
    prose = passage(subject, text, told, given.steps, given.proof)
    common: Line = {"model": subject.name, "text": prose.name, "tokens": told}
    have = {line["way"] for line in known if common.items() <= line.items()}
    offered = ways(given.quick, at_any_price=given.at_any_price)
    chosen = [way for way in offered if way.name not in have and wanted(way, given.ways)]
    if all(way == EXACT for way in chosen):
        return []
    say(f"{subject.name}, {prose.name}, {told:,} tokens: {len(chosen)} ways")
    kv = keys_and_values(subject, prose, given.cache)
    config = AT_ANY_PRICE if given.at_any_price else CONFIG
    made: list[Line] = []
    for begin in range(0, len(chosen), given.rows):
        batch = [EXACT, *(way for way in chosen[begin : begin + given.rows] if way != EXACT)]
        for line in measure(subject, prose, batch, kv, given.proof, facts=given.facts, config=config):
            if line["way"] not in {other["way"] for other in made}:  # the reference runs with each batch, and counts once
                made.append({"benchmark": "real_model", **common, **line})
                report(**made[-1])  # type: ignore[arg-type]  # benchmark is a string
    return made


def wanted(way: Way, families: list[str] | None) -> bool:
    """Whether a way is to be run; the reference always is."""
    return families is None or way == EXACT or way.name.startswith(tuple(families))


def measure(
    subject: Subject, prose: Passage, batch: list[Way], kv: np.ndarray, proof: int, *, facts: bool = True, config: Config = CONFIG
) -> list[Line]:
    """One line for each way of a batch, whose first is exact."""
    import kvdb

    with kvdb.connect() as beside, attach(subject.model, beside) as engine:
        databases = Databases(engine.spec, prose, kv, config)
        try:
            databases.prepare(batch)
            prove(subject, databases, batch, prose.elsewhere[: proof + 1])
            lines = decode(subject, databases, batch, prose)
            told = recall(subject, databases, batch, prose) if facts else None
        finally:
            databases.close()
    for line, way in zip(lines, batch, strict=True):
        if told is not None:
            line["facts"] = told[way.name]
    return lines


def prove(subject: Subject, databases: Databases, batch: list[Way], ids: list[int]) -> None:
    """Let the ways that stand on evidence answer steps over other text. Audits are free there, so that few steps show as much as
    many do otherwise."""
    learning = [way for way in batch if way.learns]
    if learning and len(ids) > 1:
        with free_audits(), databases.sessions([EXACT, *learning]) as sessions:
            each = EachItsOwn([EXACT, *learning])
            for step, _ in enumerate(logits_of(subject, databases.spec, sessions, each, ids[:-1])):
                if step % 64 == 63:
                    say(f"proof: {step + 1} of {len(ids) - 1} steps")


def decode(subject: Subject, databases: Databases, batch: list[Way], prose: Passage) -> list[Line]:
    """The steps that are measured."""
    with databases.sessions(batch) as sessions:
        each = EachItsOwn(batch, ERROR_STEPS)
        before = counters_of(sessions)
        logits = logits_of(subject, databases.spec, sessions, each, prose.ahead[:-1])
        measured = compare(logits, prose.ahead, batch)
        read = [decode_stats(before, [Row(session)], databases.spec, databases.spec.layers) for session in sessions]
        counted = [session.stats() for session in sessions]
    exact_s = statistics.median(each.seconds[0])
    lines = []
    for i, way in enumerate(batch):
        attention_s = statistics.median(each.seconds[i])
        errors = np.sort(each.errors[i]) if each.errors[i] else np.zeros(1)
        line = line_of(way, measured[i], read[i], counted[i]) | {"nll_exact": statistics.mean(measured[0].nll)}
        line |= {"error_median": float(np.median(errors)), "error_p95": float(np.quantile(errors, 0.95))}
        lines.append(line | {"ms": 1e3 * attention_s, "faster": exact_s / attention_s})
    return lines


def line_of(way: Way, measured: Measured, read: DecodeStats | None, counted: SessionStats) -> Line:
    """What is said of one way. attended, read: shares of what exact attention attends and reads. ways, audits: what was
    proven."""
    assert read is not None
    proven: Line = {"ways": dict(counted.ways), "audits": counted.error_audits, "audited_p95": counted.error_p95}
    return {
        "way": way.name,
        "family": way.family,
        **measured.summary(),
        "attended": read.attended_share,
        "read": read.nbytes_share,
        "rules": dict(counted.rules),
        **(proven if way.learns else {}),
    }


def recall(subject: Subject, databases: Databases, batch: list[Way], prose: Passage) -> dict[str, int]:
    """How many of the planted facts each way tells."""
    right: Counter[str] = Counter({way.name: 0 for way in batch})
    for question in prose.questions:
        with databases.sessions(batch) as sessions:
            each = EachItsOwn(batch)
            ids = question.asked + question.answer[:-1]
            told = answered(logits_of(subject, databases.spec, sessions, each, ids), question)
        right.update(way.name for way, good in zip(batch, told, strict=True) if good)
    return dict(right)


if __name__ == "__main__":
    main()
