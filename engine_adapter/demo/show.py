"""The demo, from the document to the verdict."""

import random
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

import engine_adapter.transformers
import kvdb
from engine_adapter.base import DecodeStats
from engine_adapter.demo.audits import audit
from engine_adapter.demo.plain import PlainReader
from engine_adapter.demo.server import ServerProcess
from engine_adapter.models import vault
from engine_adapter.transformers import TransformersEngine
from indexes.retrieval import Exact, Retrieval
from kvdb.commands.explain import table as plan_table
from kvdb.config import MIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "handbook"
FIRST_TOKENS = 2048
"""A document of at least twice as many tokens answers a first question once this many are stored."""
LOOK_SECONDS = 0.05
BAR = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.completed:,.0f} tokens"))
LEGEND = """
kvdb, plain: the time from the question to the first token of the answer. Plain
transformers reads the document first, which was timed once.
"""
ANSWER_TOKENS = vault.CODE_DIGITS + 1  # and the full stop behind them


@dataclass(frozen=True)
class Answer:
    """The answer to one question over kvdb: its tokens, the number of reused prompt tokens, seconds to the first token, how much
    its steps read, and EXPLAIN ANALYZE of its last query in each layer."""

    fact: vault.Fact
    question: list[int]
    ids: list[int]
    text: str
    reused: int
    first_token_seconds: float
    decode: DecodeStats
    plans: list[kvdb.Plan]

    @property
    def right(self) -> bool:
        return self.fact.answered_by(self.text)

    @property
    def verdict(self) -> str:
        """The code in the answer, and whether it is right, with rich's colours."""
        code = self.text.replace(" ", "").rstrip(".")
        return f"{code} [green]right[/]" if self.right else f"{code} [red]wrong[/]"

    def __str__(self) -> str:
        """A line with rich's colours."""
        return (
            f"{self.fact.question.strip():<22}  {self.verdict}  {self.reused:,} tokens reused, first token after "
            f"{self.first_token_seconds * 1000:,.0f} ms"
        )


def show(server: ServerProcess, given: Namespace, retrieval: Retrieval | None) -> int:
    """Run the demo on this server, as its command line says; its exit status.

    It is 0 when kvdb's tokens are those of plain transformers or, with a retrieval that leaves tokens out, when as many answers
    are right.
    """
    searches = retrieval not in {None, Exact()}
    hints = kvdb.Hints(index=given.index) if searches else None
    console = Console(highlight=False)
    disable_progress_bar()  # of loading a model this small
    model, tokenizer = vault.load()
    document = vault.document(tokenizer, given.tokens, given.facts, given.seed)
    chosen = random.Random(given.seed).sample(document.facts, min(given.questions, given.facts))
    console.print(
        f'[bold]{len(document.ids):,} tokens[/] of prose with {given.facts} facts in it, such as "{chosen[0].sentence.strip()}"\n'
        "A question is how a fact begins, and the answer its code.",
        soft_wrap=True,
    )
    console.print(f"A server keeps it, process {server.pid}: {server.ready_line}\n", soft_wrap=True)
    with kvdb.connect(server.target) as db, engine_adapter.transformers.attach(model, db) as engine:
        _first_pages(console, db, engine, tokenizer, document)
        _store(console, engine, document.ids)
        if searches:
            _index(console, db, given.index)
        console.print("Questions about it, each in a session of its own:\n")
        answers = []
        for fact in chosen:
            answers.append(_ask(engine, tokenizer, document.ids, fact, retrieval, hints))
            console.print(f"  {answers[-1]}", soft_wrap=True)
    console.print("\nBeside plain transformers, which has to read the document first:\n")
    with Progress(*BAR, console=console, transient=True) as bar:
        task = bar.add_task("plain transformers reads it", total=len(document.ids))
        plain = PlainReader(model, document.ids, lambda done, _: bar.update(task, completed=done))
        plain_answers = [plain.answer(answer.question, ANSWER_TOKENS) for answer in answers]
    plain_right = sum(a.fact.answered_by(str(tokenizer.decode(ids))) for a, (ids, _) in zip(answers, plain_answers, strict=True))
    equal = [answer.ids == ids for answer, (ids, _) in zip(answers, plain_answers, strict=True)]
    again = [plain.prefill_seconds + seconds for _, seconds in plain_answers]
    console.print(_table(answers, again, equal))
    console.print(LEGEND)
    if given.explain:
        plans = answers[-1].plans
        shown = f"The last question's last query, explained and analyzed:\n{plan_table(plans)}\n\n{plans[-1]}\n"
        console.print(shown, markup=False, soft_wrap=True)
    if given.explain and retrieval is None:
        with kvdb.connect(server.target) as db, engine_adapter.transformers.attach(model, db) as engine:
            audit(console, db, engine, tokenizer, document, NAME, [answer.decode for answer in answers])
    status = _verdict_of_search(console, answers, equal, plain_right) if searches else _verdict(console, answers, equal)
    console.print(f"The server's log: {server.log}", soft_wrap=True)
    return status


def _first_pages(
    console: Console,
    db: kvdb.Client,
    engine: TransformersEngine,
    tokenizer: "PreTrainedTokenizerBase",
    document: vault.VaultDocument,
) -> None:
    """Answer a question as early as possible, from the beginning of a long document. The beginning is dropped again, so that the
    whole document is one segment."""
    pages, fact = document.ids[:FIRST_TOKENS], document.facts[0]
    if len(document.ids) < 2 * FIRST_TOKENS or fact.sentence not in str(tokenizer.decode(pages)):
        return
    name = engine.store(name=f"{NAME}, first pages", input_ids=torch.tensor([pages])).name
    console.print(f"The first {FIRST_TOKENS:,} tokens are there, and answer what stands in them:\n")
    console.print(f"  {_ask(engine, tokenizer, pages, fact, Exact(), None)}\n", soft_wrap=True)
    db.drop(name)


def _store(console: Console, engine: TransformersEngine, document: list[int]) -> None:
    with Progress(*BAR, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("importing, once", total=len(document))
        context = engine.store(
            name=NAME,
            input_ids=torch.tensor([document]),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f'stored as "{NAME}": {context.info.nbytes / MIB:,.1f} MiB in the server\'s blocks\n')


def _index(console: Console, db: kvdb.Client, kind: str) -> None:
    started = perf_counter()
    with (
        ThreadPoolExecutor(1) as pool,
        Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), console=console, transient=True) as bar,
    ):
        task, building = bar.add_task(f"building an index, {kind}", total=1.0), pool.submit(db.build_index, NAME, kind)
        while not wait([building], LOOK_SECONDS).done:
            under_way = [info.progress for info in db.indexes(NAME) if info.kind == kind]
            bar.update(task, completed=sum(under_way) / max(len(under_way), 1))
    built = building.result()
    seconds = perf_counter() - started
    if not built:
        console.print("the document is too short for an index, so everything is read\n")
        return
    nbytes, raw = sum(info.nbytes for info in built), db.get(NAME).info.nbytes
    console.print(
        f"index {kind}: built in {seconds:,.2f} s, {nbytes / MIB:,.1f} MiB, {nbytes / raw:.0%} of the keys and values\n"
    )


def _ask(
    engine: TransformersEngine,
    tokenizer: "PreTrainedTokenizerBase",
    document: list[int],
    fact: vault.Fact,
    retrieval: Retrieval | None,
    hints: kvdb.Hints | None,
) -> Answer:
    question: list[int] = tokenizer.encode(fact.question, add_special_tokens=False)
    prompt = torch.tensor([document + question])
    plans: list[kvdb.Plan] = []

    def inspect(sessions: Sequence[kvdb.Session]) -> None:
        """Explain the last query of each layer; called after the answer, so that its times do not include it."""
        for layer in range(engine.spec.layers):
            plans.append(sessions[0].explain(layer, analyze=True, retrieval=retrieval, hints=hints))

    out = engine.generate(
        prompt,
        max_new_tokens=ANSWER_TOKENS,
        min_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        retrieval=retrieval,
        hints=hints,
        inspect=inspect,
    )
    ids: list[int] = out[0, prompt.shape[1] :].tolist()
    report = engine.last
    assert report is not None
    assert report.first_token_seconds is not None
    assert report.decode is not None
    text = str(tokenizer.decode(ids))
    return Answer(fact, question, ids, text, report.reused[0], report.first_token_seconds, report.decode, plans)


def _table(answers: list[Answer], again: list[float], equal: list[bool]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("question")
    table.add_column("answer")
    for column in ("kvdb", "plain", "faster"):
        table.add_column(column, justify="right")
    table.add_column("tokens")
    for answer, seconds, same in zip(answers, again, equal, strict=True):
        table.add_row(
            answer.fact.question.strip(),
            answer.verdict,
            f"{answer.first_token_seconds * 1000:,.0f} ms",
            f"{seconds:,.1f} s",
            f"{seconds / answer.first_token_seconds:,.0f}x",
            "[green]the same[/]" if same else "[red]others[/]",
        )
    return table


def _verdict(console: Console, answers: list[Answer], equal: list[bool]) -> int:
    right = f"{sum(answer.right for answer in answers)} of {len(answers)} answers are right"
    if all(equal):
        console.print(f"[bold green]{right}; all {len(answers) * ANSWER_TOKENS} tokens equal those of plain transformers.[/]")
        return 0
    console.print(f"[bold red]{right}; {equal.count(False)} answers differ from plain transformers.[/]")
    return 1


def _verdict_of_search(console: Console, answers: list[Answer], equal: list[bool], plain_right: int) -> int:
    """Judge by right answers: with tokens left out, an answer may differ from plain transformers' and still be right."""
    right = sum(answer.right for answer in answers)
    read = reduce(add, [answer.decode for answer in answers])
    console.print(
        f"read for the answers: {read.attended_share:.2%} of the tokens attended, {read.scanned / read.tokens:.0%} looked at in "
        f"some form, {read.nbytes_share:.1%} of the bytes that reading everything takes"
    )
    colour = "green" if right >= plain_right else "red"
    console.print(
        f"[bold {colour}]{right} of {len(answers)} answers are right, {plain_right} in plain transformers; "
        f"{sum(equal)} are the same tokens.[/]"
    )
    return 0 if right >= plain_right else 1
