"""The picture of `benchmarks/real_model.py`: divergence from exact attention over the share of bytes that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")  # before pyplot, so that no display is looked for

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's colours, told apart with every kind of colour vision; marks differ as well.
KINDS = {
    "flat": "#0072B2",
    "coarse-bounds": "#56B4E9",
    "coarse-means": "#009E73",
    "coarse-clusters": "#E69F00",
    "hnsw": "#D55E00",
}
MARKS = {"exact": "s", "noise": "x", "error_max": "*", "Dipr": "o", "TopK": "^", "TopP": "v", "max_missed_mass": "D"}
LEAST = 1e-7
"""What is nearer to exact attention than this is drawn here."""
GOAL = 1e-3
Line = dict[str, Any]


def draw(lines: list[Line], path: Path) -> None:
    """A panel for each model, text and length."""
    points = list(dict.fromkeys((line["model"], line["text"], line["tokens"]) for line in lines))
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, panels = plt.subplots(rows, columns, figsize=(max(8.5, 4.4 * columns), 4.4 * rows + 1.2), sharey=True, squeeze=False)
    for axes in panels.flat[len(points) :]:
        axes.set_visible(False)
    for axes, (model, text, tokens) in zip(panels.flat, points, strict=False):
        mine = [line for line in lines if (line["model"], line["text"], line["tokens"]) == (model, text, tokens)]
        _panel(axes, mine)
        axes.set_title(f"{model}, {text}, {tokens:,} tokens", fontsize=11)
    for axes in panels[:, 0]:
        axes.set_ylabel("KL to exact attention, nats a token")
    handles = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4 if columns < 3 else 5, fontsize=9)
    legend_rows = -(-len(handles) // (4 if columns < 3 else 5))
    figure.tight_layout(rect=(0, (0.06 + 0.24 * legend_rows) / (4.4 * rows + 1.2), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axes: Axes, lines: list[Line]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True, which="major", lw=0.4, color="#cccccc")
    for family in dict.fromkeys(line["family"] for line in lines):
        mine = sorted((line for line in lines if line["family"] == family), key=lambda line: line["read"])
        what, _, kind = family.partition(", ")
        x, y = [100 * line["read"] for line in mine], [max(line["kl"], LEAST) for line in mine]
        size = 13 if what == "error_max" else 6
        axes.plot(x, y, color=KINDS.get(kind, "black"), marker=MARKS[what], ms=size, lw=1.0, label=family)
        if what == "error_max":
            for line, left, up in zip(mine, x, y, strict=True):
                axes.annotate(line["way"].split()[1], (left, up), (6, 4), textcoords="offset points", fontsize=8)
    axes.axhline(GOAL, color="grey", lw=1, ls="--")
    axes.axvline(100, color="black", lw=1, ls=":")
    axes.set_xlabel("bytes read, % of all keys and values")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"at most {value:g}" if value <= LEAST else f"{value:g}"))
