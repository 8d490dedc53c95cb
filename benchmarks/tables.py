"""The rows of `benchmarks/retrieve.py` as people read them, and what follows from several of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from indexes.retrieval import Dipr
from kvdb.commands.output import table

Columns = tuple[tuple[str, str, str, float], ...]
"""A field, its title, its format, and what its values are multiplied with, for each column."""
COLUMNS: Columns = (
    ("kind", "kind", "", 1),
    ("workload", "workload", "", 1),
    ("tokens", "tokens", ",", 1),
    ("ms", "ms", ".3f", 1),
    ("search_ms", "search", ".3f", 1),
    ("exact_ms", "exact", ".2f", 1),
    ("faster", "faster", ".1f", 1),
    ("read_ms", "read", ".2f", 1),
    ("faster_than_reading", "of read", ".1f", 1),
    ("native_share", "native", ".2f", 1),
    ("error", "error %", ".3f", 100),
    ("recall", "recall", ".4f", 1),
    ("found", "found", ".0f", 1),
    ("scanned_share", "scan %", ".2f", 100),
    ("read_mib", "read MiB", ".2f", 1),
    ("read_whole", "whole %", ".0f", 100),
    ("token_nbytes", "B/token", ".1f", 1),
    ("build_s_per_million_keys", "s/M keys", ".2f", 1),
    ("bound_valid", "bound %", ".1f", 100),
    ("missed", "missed", ".1e", 1),
    ("missed_bound", "at most", ".1e", 1),
    ("bound_ratio", "x truth", ".3g", 1),
)
LIBRARY_COLUMNS: Columns = (
    ("name", "library", "", 1),
    ("tokens", "tokens", ",", 1),
    ("effort", "effort", "", 1),
    ("recall", "recall", ".4f", 1),
    ("single_ms", "one by one ms", ".3f", 1),
    ("batched_ms", "batched ms", ".3f", 1),
    ("build_s_per_million", "s/M keys", ".1f", 1),
)
Row = dict[str, Any]


def show(rows: list[Row], to: TextIO) -> None:
    """The indexes at the usual alpha, then the other libraries."""
    timed = [row for row in rows if "ms" in row]
    if timed:
        raw = timed[0]["raw_token_nbytes"]
        print(f"\nDIPR, alpha {Dipr().alpha}; a token's keys and values take {raw} bytes for each KV head", file=to)
        print(_table(timed, COLUMNS), file=to)
    libraries = [row for row in rows if "effort" in row]
    if libraries:
        print(f"\nTop-{libraries[0]['k']} by other libraries: one step of every KV head", file=to)
        print(_table(libraries, LIBRARY_COLUMNS), file=to)


def growth(rows: list[Row]) -> Iterator[Row]:
    """From 128K tokens, or what is nearest below, to the longest: by how much time and tokens scanned grow."""
    timed = [row for row in rows if "ms" in row]
    for kind, workload in dict.fromkeys((row["kind"], row["workload"]) for row in timed):
        mine = sorted((row for row in timed if (row["kind"], row["workload"]) == (kind, workload)), key=lambda row: row["tokens"])
        start = max((row for row in mine if row["tokens"] <= 131_072), key=lambda row: row["tokens"], default=mine[0])
        if mine[-1]["tokens"] > start["tokens"]:
            ratios = {f"{name}_ratio": mine[-1][name] / start[name] for name in ("ms", "exact_ms", "scanned", "read_mib")}
            yield {"kind": kind, "workload": workload, "from_tokens": start["tokens"], "to_tokens": mine[-1]["tokens"], **ratios}


def equal_cost(ours: list[Row], others: list[Row]) -> Iterator[Row]:
    """For each index and library: its recall in the time of our search, and its time for our recall; None where it has neither.

    A library's time is the better of its own batching on all threads and, taken as dividing ideally, one thread's time halved.
    """
    for row in (row for row in ours if "ms" in row):
        for name in dict.fromkeys(point["name"] for point in others):
            points = [(min(p["batched_ms"], p["single_ms"] / 2), p["recall"]) for p in others if p["name"] == name]
            yield {
                "kind": row["kind"],
                "tokens": row["tokens"],
                "search_ms": row["search_ms"],
                "recall": row["recall"],
                "library": name,
                "library_recall_in_our_time": max((recall for ms, recall in points if ms <= row["search_ms"]), default=None),
                "library_ms_least": min(ms for ms, _ in points),
                "library_ms_for_our_recall": min((ms for ms, recall in points if recall >= row["recall"] - 1e-4), default=None),
                "library_recall_best": max(recall for _, recall in points),
            }


def _table(rows: list[Row], columns: Columns) -> str:
    cells = [
        ["-" if row[field] is None else f"{factor * row[field]:{form}}" for field, _, form, factor in columns] for row in rows
    ]
    return table([[title for _, title, _, _ in columns], *cells], left={"kind", "workload", "library"})
