"""Rows of results: written as JSON lines as they come, and drawn as one table in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, object]
TIMED = ("ms", "gb_s", "of_copy", "ratio", "reach", "holds")
"""What only a card can say, or be asked. Without one, none of it is written anywhere."""
COLUMNS = {
    "question": "question",
    "case": "case",
    "what": "what",
    "ms": "ms",
    "gb_s": "GB/s",
    "of_copy": "of copy",
    "ratio": "ratio",
    "reach": "asked for",
    "holds": "holds",
    "error": "error",
    "note": "",
}


class Wrong(Exception):
    """A result that is not what the float64 reference says."""


class Results:
    """The rows of one question. path: a file that they are appended to. timed: whether this is a card, at its full sizes."""

    def __init__(self, path: Path, question: str, timed: bool) -> None:
        self._path, self._question, self._timed = path, question, timed

    def add(self, case: str, what: str, **fields: object) -> None:
        """One row. ms: milliseconds. gb_s: of the bytes that had to be read. of_copy: that, over what a copy of the device reads
        and writes. ratio: what `reach`, which is asked for, speaks of; holds: whether it does. error: relative, to float64."""
        row: Row = {"benchmark": "gpu", "question": self._question, "case": case, "what": what}
        row |= {
            name: _short(value)
            for name, value in fields.items()
            if value not in {None, ""} and (self._timed or name not in TIMED)
        }
        self._write(row)

    def skip(self, case: str, why: str, what: str = "kvdb") -> None:
        self.add(case, what, status="skipped", note=f"skipped: {why}")

    def end(self, status: str, seconds: float, error: str = "") -> None:
        """How the question ended: done, failed or out of time."""
        row: Row = {"benchmark": "gpu.end", "question": self._question, "status": status}
        self._write(row | ({"seconds": _short(seconds)} if self._timed else {}) | ({"error": error} if error else {}))

    def _write(self, row: Row) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Row]) -> str:
    """All measurements, and what failed, as text; columns that no row has are left out."""
    lines = [_cells(row) for row in rows if row["benchmark"] == "gpu"]
    lines += [
        {"question": str(row["question"]), "case": str(row["status"]).upper(), "note": str(row.get("error", ""))}
        for row in rows
        if row["benchmark"] == "gpu.end" and row["status"] != "done"
    ]
    shown = [name for name in COLUMNS if any(line.get(name) for line in lines)]
    drawn = [[COLUMNS[name] for name in shown], *([line.get(name, "") for name in shown] for line in lines)]
    widths = [max(len(cells[i]) for cells in drawn) for i in range(len(shown))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in drawn)


def _cells(row: Row) -> dict[str, str]:
    shares = {"of_copy": 1, "error": 2}
    cells = {name: str(value) for name, value in row.items()}
    for name, digits in shares.items():
        if name in row:
            cells[name] = f"{100 * float(str(row[name])):.{digits}f} %"
    if "ratio" in row:
        cells["ratio"] = f"{row['ratio']}x"
    if "holds" in row:
        cells["holds"] = "yes" if row["holds"] else "NO"
    return cells


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
