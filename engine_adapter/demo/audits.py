"""The demo's end: what was proven of the model's heads, and how far audited answers were from exact ones."""

from collections.abc import Sequence
from functools import reduce
from math import inf
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvdb
from engine_adapter.base import DecodeStats
from engine_adapter.models import vault
from engine_adapter.transformers import TransformersEngine
from query_optimizer.error_budget import ErrorBudget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MORE_SECONDS = 20.0
"""For so long more questions are asked: a proof takes dozens of answers that are compared with exact ones."""


def audit(
    console: Console,
    db: kvdb.Client,
    engine: TransformersEngine,
    tokenizer: "PreTrainedTokenizerBase",
    document: vault.VaultDocument,
    name: str,
    asked: Sequence[DecodeStats],
) -> None:
    """Ask what else stands in the document, for a while, and show what audits say of it all. name: of the stored document. asked:
    how the questions before were answered."""
    if not any(segment.audits.any() for segment in db.statistics(name).segments):
        console.print("Nothing was searched or compared: reading this much takes no longer than a search.", soft_wrap=True)
        return
    more = _ask_more(console, engine, tokenizer, document)
    heads = proven_heads(db.explain(name))
    console.print(f"{len(more)} more questions were answered, and some answers compared with exact ones. By KV head:\n")
    console.print(_table(db.statistics(name).segments[0], heads, engine.spec.kv_heads))
    read = reduce(add, [*asked, *more])
    console.print(f"\n{verdict(read, sum(map(len, heads)), engine.spec.kv_heads * len(heads))}\n", soft_wrap=True)


def _table(statistics: kvdb.SegmentStatistics, proven: Sequence[set[int]], kv_heads: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("layer", "audits", "error at p95, at most", "proven"):
        table.add_column(column, justify="right")
    group = statistics.audits.shape[1] // kv_heads
    for layer, heads in enumerate(proven):
        audits, errors = statistics.audits[layer, ::group].tolist(), statistics.error[layer, ::group].tolist()
        bounds = ", ".join("-" if error == inf else f"{error:.2%}" for error in errors)
        table.add_row(str(layer), ", ".join(map(str, audits)), bounds, f"{len(heads)} of {kv_heads}")
    return table


def proven_heads(plans: Sequence[kvdb.Plan]) -> list[set[int]]:
    """The KV heads that are answered by a proven way, by layer."""
    return [
        {
            head
            for access in plan.accesses
            if access.rule == ErrorBudget.name and access.index is not None
            for head in access.heads
        }
        for plan in plans
    ]


def verdict(read: DecodeStats, proven: int, heads: int) -> str:
    """What was proven, how queries were answered, and what audits of answers in use showed, in one sentence each."""
    total = max(sum(read.ways.values()), 1)
    ways = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(read.ways.items(), key=lambda one: -one[1]))
    lines = [f"{proven} of {heads} KV heads are proven to keep the error budget and searched; the others are read whole."]
    lines.append(f"Queries were answered so: {ways or 'none'}.")
    if read.error_audits:
        lines.append(
            f"Audited error of answers that were searched for, in the worst session: {read.error_median:.2%} at the median, "
            f"{read.error_p95:.2%} at p95, {read.error_max_seen:.2%} at most; {read.error_audits} audits."
        )
    else:
        lines.append("No answer that was searched for has been audited yet.")
    return "\n".join(lines)


def _ask_more(
    console: Console, engine: TransformersEngine, tokenizer: "PreTrainedTokenizerBase", document: vault.VaultDocument
) -> list[DecodeStats]:
    """How questions about facts of the document were answered, as many as there is time for."""
    answered: list[DecodeStats] = []
    started = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("asking on, while answers are audited", total=MORE_SECONDS)
        for fact in document.facts:
            question = tokenizer.encode(fact.question, add_special_tokens=False)
            engine.generate(
                torch.tensor([document.ids + question]), max_new_tokens=vault.CODE_DIGITS + 1, min_new_tokens=2, do_sample=False
            )
            assert engine.last is not None
            if engine.last.decode is not None:
                answered.append(engine.last.decode)
            seconds = perf_counter() - started
            bar.update(task, completed=seconds)
            if seconds > MORE_SECONDS:
                break
    return answered
