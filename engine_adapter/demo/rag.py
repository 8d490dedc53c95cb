"""The RAG demo: documents added once, questions about novel mixes of them, and the price of reuse in quality."""

from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

import kvdb
from engine_adapter.demo.library import Library, LibraryPrompt, library, prompts
from engine_adapter.models import sections
from engine_adapter.models.vault import CODE_DIGITS
from engine_adapter.rag import Answer, RagEngine
from engine_adapter.rag.check import Check, FullAnswer
from engine_adapter.rag.plain import full_answer
from kvdb.config import MIB

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ANSWER_TOKENS = CODE_DIGITS
CHUNK_TOKENS = 128
"""Short, so that each document has several chunks, which the demo is about."""
FEWER_MAX = 0.2
"""How many of a full prefill's right answers may be missed, as a share: a dozen questions cannot show more. The check asks
more."""
HEAD = "vault            answer       reused  recomputed  first token   prefill  faster"
LEGEND = """
reused, recomputed: stored tokens of the prompt, taken as they are or computed
again. first token: the time from the question to it. prefill: that time in
plain transformers, which reads all documents again.
"""


@dataclass(frozen=True)
class DemoComparison:
    """One question: the answer from blended documents, and that of a full prefill."""

    prompt: LibraryPrompt
    answer: Answer
    full: FullAnswer

    @property
    def right(self) -> bool:
        return self.prompt.question.answered_by(self.answer.text)

    @property
    def full_right(self) -> bool:
        return self.prompt.question.answered_by(self.full.text)

    @property
    def faster(self) -> float:
        """How many times as fast as a full prefill the first token came."""
        return self.full.first_token_seconds / self.answer.usage.first_token_seconds

    def __str__(self) -> str:
        """A line below HEAD, with rich's colours."""
        usage, code = self.answer.usage, self.answer.text.replace(" ", "")
        verdict = "[green]right[/]" if self.right else "[red]wrong[/]"
        first, full = (1000 * seconds for seconds in (usage.first_token_seconds, self.full.first_token_seconds))
        return (
            f"{self.prompt.question.text.removeprefix(' Vault '):15}  {code:{CODE_DIGITS}} {verdict}  {usage.reused:6,}  "
            f"{usage.recomputed:10,}  {first:8,.0f} ms  {full:5,.0f} ms  {self.faster:5.1f}x"
        )


def show(documents: int, together: int, questions: int, checked: int, recompute: float | None, seed: int) -> int:
    """Run the demo; its exit status: 0 unless blended documents give clearly fewer right answers than a full prefill.

    documents: the number of documents in the library. together: the number in each prompt. questions: the number of questions
    shown. checked: the number of prompts that the check compares. recompute: the share that is computed again, None for what the
    controller chooses on each prompt.
    """
    console = Console(highlight=False)
    disable_progress_bar()  # of loading a model this small
    model, tokenizer = sections.load()
    held = library(tokenizer, documents, seed)
    shown = prompts(held, questions, together, seed)
    sample = prompts(held, checked, together, seed + 1)
    record = next(question for question in held.questions if question.kind == "heading")
    heading, word = record.text.split()[1:]
    console.print(
        f"[bold]{documents} documents[/] of Python's documentation, {held.tokens:,} tokens. Records in them, such as "
        f'"Vault same {word} {" ".join(record.code)}.", mean nothing without their heading, here "Section {heading}.", '
        "which most often stands in an earlier chunk.\n"
    )
    with kvdb.connect() as db, RagEngine(model, tokenizer, db, chunk_tokens=CHUNK_TOKENS) as rag:
        _add(console, rag, held)
        console.print(f"{questions} questions, each about {together} of the documents, in an order that never came before:\n")
        console.print(HEAD, soft_wrap=True)
        answers = []
        for prompt in shown:
            answers.append(_ask(rag, model, tokenizer, held, prompt, recompute))
            console.print(f"{answers[-1]}", soft_wrap=True)
        console.print(LEGEND)
        console.print(f"What a larger share computed again is worth (rag.check of {checked} more prompts):\n", soft_wrap=True)
        check = _check(console, rag, sample)
    console.print(f"{check}", markup=False, soft_wrap=True)
    plan = answers[-1].answer.report.explain
    console.print(f"\nThe plan of the last question's last query:\n{plan}\n", markup=False, soft_wrap=True)
    return _verdict(console, answers)


def _add(console: Console, rag: RagEngine, held: Library) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("adding, once", total=held.tokens)
        before = 0
        for title, ids in held.documents.items():
            rag.add(title, ids, progress=lambda done, _, before=before: bar.update(task, completed=before + done))  # type: ignore[misc]
            before += len(ids)
    infos = rag.documents()
    nbytes, chunks = sum(info.nbytes for info in infos), sum(info.chunks for info in infos)
    console.print(f"stored as {chunks} chunks, each computed alone: {nbytes / MIB:,.1f} MiB\n")


def _ask(
    rag: RagEngine,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    held: Library,
    prompt: LibraryPrompt,
    recompute: float | None,
) -> DemoComparison:
    question = prompt.question.text
    answer = rag.answer(question, prompt.titles, recompute=recompute, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    ids = [*chain.from_iterable(held.documents[title] for title in prompt.titles)]
    ids += tokenizer.encode(question, add_special_tokens=False)
    return DemoComparison(prompt, answer, full_answer(model, tokenizer, torch.tensor(ids), max_new_tokens=ANSWER_TOKENS))


def _check(console: Console, rag: RagEngine, sample: list[LibraryPrompt]) -> Check:
    triples = [(prompt.question.text, prompt.titles, prompt.code) for prompt in sample]
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("asking at every ratio", total=None)
        return rag.check(
            triples, max_new_tokens=ANSWER_TOKENS, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _verdict(console: Console, answers: list[DemoComparison]) -> int:
    right, full = sum(comparison.right for comparison in answers), sum(comparison.full_right for comparison in answers)
    faster = median(comparison.faster for comparison in answers)
    good = right >= (1 - FEWER_MAX) * full
    console.print(
        f"[bold {'green' if good else 'red'}]{right} of {len(answers)} answers are right, {full} with a full prefill; "
        f"the first token comes {faster:.1f} times as fast.[/]"
    )
    return 0 if good else 1
