"""The two pictures of `benchmarks/retrieve.py`: time over length, error over bytes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")  # before pyplot, so that no display is looked for

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from indexes.retrieval import Dipr

# Okabe and Ito's colours, told apart with every kind of colour vision; marks differ as well.
STYLES: dict[str, tuple[str, str]] = {
    "exact": ("#000000", "s"),
    "flat": ("#0072B2", "o"),
    "quantized": ("#CC79A7", "X"),
    "bounds": ("#56B4E9", "v"),
    "means": ("#009E73", "^"),
    "clusters": ("#E69F00", "D"),
    "hnsw": ("#D55E00", "P"),
    "hnsw-unsampled": ("#999999", "p"),
}
NAMES = {
    "exact": "exact attention",
    "bounds": "coarse-bounds",
    "means": "coarse-means",
    "clusters": "coarse-clusters",
    "hnsw-unsampled": "hnsw, no sample queries",
}
Row = dict[str, Any]


def draw(rows: list[Row], folder: Path) -> None:
    """Write both, as far as there are rows for them."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    ours = [row for row in rows if row["benchmark"] == "retrieve"]
    timed = [row for row in ours if "ms" in row]
    if len({row["tokens"] for row in timed}) > 1:
        _time_over_length(timed, folder / "time-over-length.png")
    lengths = {row["tokens"] for row in ours if row["alpha"] != Dipr().alpha}
    if lengths:  # of several, the one that most workloads have
        length = max(lengths, key=lambda n: (len({row["workload"] for row in ours if row["tokens"] == n}), n))
        _error_over_bytes([row for row in ours if row["tokens"] == length], folder / "error-over-bytes.png")


def _time_over_length(rows: list[Row], path: Path) -> None:
    figure, panels = _panels(rows)
    for axes, (workload, mine) in zip(panels, _by(rows, "workload"), strict=True):
        lengths = sorted({row["tokens"] for row in mine})
        exact = [_least(row["exact_ms"] for row in mine if row["tokens"] == n) for n in lengths]
        _line(axes, "exact", lengths, exact)
        for kind, own in _by(mine, "kind"):
            own.sort(key=lambda row: row["tokens"])
            _line(axes, kind, [row["tokens"] for row in own], [row["ms"] for row in own])
        axes.set_xticks(lengths, [f"{n // 1024}K" if n < 1 << 20 else f"{n >> 20}M" for n in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(f"{workload} heads", fontsize=11)
        axes.set_xlabel("tokens in the context")
    panels[0].set_ylabel("one decode step of one layer, ms")
    _finish(figure, panels, path)


def _error_over_bytes(rows: list[Row], path: Path) -> None:
    figure, panels = _panels(rows)
    for axes, (workload, mine) in zip(panels, _by(rows, "workload"), strict=True):
        for kind, own in _by(mine, "kind"):
            own.sort(key=lambda row: row["alpha"])
            x, y = [100 * row["read_share"] for row in own], [100 * row["error"] for row in own]
            _line(axes, kind, x, y, width=0.8)
            usual = [i for i, row in enumerate(own) if row["alpha"] == Dipr().alpha]
            axes.plot([x[i] for i in usual], [y[i] for i in usual], "o", ms=13, mfc="none", mec=_style(kind)[0], mew=1.2)
        axes.axvline(100, color="black", lw=1, ls=":")
        axes.axhline(1, color="grey", lw=1, ls="--")
        axes.annotate("1 % error", (0.62, 1.12), xycoords=("axes fraction", "data"), fontsize=9, color="grey")
        axes.set_title(f"{workload} heads, {mine[0]['tokens'] // 1024}K tokens", fontsize=11)
        axes.set_xlabel("bytes read, % of all keys and values")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("relative error of the output, %")
    figure.text(
        0.5,
        0.005,
        f"points: alpha from 0.2 (top) to 0.0005; ringed: {Dipr().alpha}; dotted: everything is read",
        ha="center",
        fontsize=9,
    )
    _finish(figure, panels, path, bottom=0.05)


def _panels(rows: list[Row]) -> tuple[Any, list[Axes]]:
    count = len(_by(rows, "workload"))
    figure, panels = plt.subplots(1, count, figsize=(max(7.5, 4.0 * count), 4.8), dpi=200, sharey=True, squeeze=False)
    for axes in panels[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(visible=True, which="major", lw=0.4, color="#cccccc")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure, list(panels[0])


def _line(axes: Axes, kind: str, x: list[float], y: list[float], width: float = 1.6) -> None:
    colour, mark = _style(kind)
    dash = "--" if kind == "exact" else "-"
    axes.plot(x, y, marker=mark, ls=dash, color=colour, lw=width, ms=6, label=NAMES.get(kind, kind))


def _finish(figure: Any, panels: list[Axes], path: Path, bottom: float = 0.0) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=min(len(labels), 4), fontsize=10)
    lines = -(-len(labels) // 4)
    figure.tight_layout(rect=(0, bottom, 1, 0.98 - 0.055 * lines))
    figure.savefig(path)
    plt.close(figure)


def _style(kind: str) -> tuple[str, str]:
    return STYLES.get(kind, ("#666666", "."))


def _by(rows: list[Row], field: str) -> list[tuple[str, list[Row]]]:
    """Grouped, in the order in which they came."""
    return [(value, [row for row in rows if row[field] == value]) for value in dict.fromkeys(row[field] for row in rows)]


def _least(values: Any) -> float:
    return float(min(values))
