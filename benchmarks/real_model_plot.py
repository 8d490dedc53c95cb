"""The picture of `benchmarks/real_model.py`: divergence from exact attention over the share of bytes that is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")  # before pyplot, so that no display is looked for

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours, told apart with every kind of colour vision; marks differ as well.
KINDS = {
    "flat": "#0072B2",
    "quantized": "#CC79A7",
    "coarse-bounds": "#56B4E9",
    "coarse-means": "#009E73",
    "coarse-clusters": "#E69F00",
    "hnsw": "#D55E00",
}
MARKS = {
    "error_max": "*",
    "exact": "s",
    "noise": "x",
    "Dipr": "o",
    "TopK": "^",
    "TopK and estimate": "P",
    "Dipr and estimate": "X",
    "TopP": "v",
    "max_missed_mass": "D",
}
EVERY = "every proven way"
LEAST = 1e-6
"""What is nearer to exact attention than this is drawn here."""
GOAL = 1e-3
PANEL = 4.9
NEAR = 0.12
"""The distance of two labels in logarithms of bytes below which they are written as one; in those of KL six times that."""
Line = dict[str, Any]


def draw(lines: list[Line], path: Path) -> None:
    """A panel for each model, of the text and length of which the most ways are known."""
    panels = [
        _fullest([line for line in lines if line["model"] == model]) for model in dict.fromkeys(line["model"] for line in lines)
    ]
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(max(10.0, PANEL * len(panels)), 6.4), sharex=True, sharey=True, squeeze=False
    )
    for axes, mine in zip(all_axes.flat, panels, strict=True):
        _panel(axes, mine)
        axes.set_title(f"{mine[0]['model']}, {mine[0]['text']}, {mine[0]['tokens']:,} tokens", fontsize=11)
    all_axes[0, 0].set_ylim(LEAST / 2, None)
    all_axes[0, 0].set_ylabel("KL to exact attention, nats a token")
    _legends(figure, [line["family"] for mine in panels for line in mine])
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _fullest(lines: list[Line]) -> list[Line]:
    """The lines of one text and length, one for each way, where there are most."""
    points: dict[tuple[str, int], dict[str, Line]] = {}
    for line in lines:
        points.setdefault((line["text"], line["tokens"]), {})[line["way"]] = line
    return list(max(points.values(), key=len).values())


def _panel(axes: Axes, lines: list[Line]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True, which="major", lw=0.4, color="#dddddd")
    axes.axhline(GOAL, color="grey", lw=1, ls="--")
    axes.axvline(100, color="grey", lw=1, ls=":")
    for family in dict.fromkeys(line["family"] for line in lines):
        mine = sorted((line for line in lines if line["family"] == family), key=lambda line: float(line["read"]))
        what, _, kind = family.partition(", ")
        x, y = [100 * line["read"] for line in mine], [max(line["kl"], LEAST) for line in mine]
        big = what == "error_max"
        hollow = {"markerfacecolor": "white"} if kind == EVERY else {}
        colour = KINDS.get(kind, "black")
        axes.plot(
            x, y, color=colour, marker=MARKS[what], ms=13 if big else 7, lw=0 if big else 0.9, zorder=4 if big else 3, **hollow
        )  # type: ignore[arg-type]
        if what in {"error_max", "noise"}:
            place = (8, -3) if what == "noise" else (0, 8) if hollow else (0, -16)
            for told, (left, up) in _labels([line["way"].split()[1].rstrip(",") for line in mine], list(zip(x, y, strict=True))):
                side: Any = "left" if what == "noise" else "center"
                axes.annotate(told, (left, up), place, textcoords="offset points", fontsize=8, ha=side)
    axes.set_xlabel("bytes read, % of all keys and values")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"≤ {value:g}" if value <= LEAST else f"{value:g}"))


def _labels(told: list[str], places: list[tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    """One label for all points that would cover each other's."""
    groups: list[tuple[list[str], tuple[float, float]]] = []
    for label, (x, y) in sorted(zip(told, places, strict=True), key=lambda one: -one[1][1]):
        near = [one for one, (left, up) in groups if abs(math.log(x / left)) < NEAR and abs(math.log(y / up)) < 6 * NEAR]
        if near:
            near[0].append(label)
        else:
            groups.append(([label], (x, y)))
    return [(", ".join(sorted(labels, key=float)), place) for labels, place in groups]


def _legends(figure: Any, families: list[str]) -> None:
    """Marks say what is asked for, colours the kind of index that answers."""
    told = {family.partition(", ")[0] if not family.endswith(EVERY) else family for family in families}
    marks: list[Artist] = [_handle(what, "black", MARKS[what]) for what in MARKS if what in told]
    if f"error_max, {EVERY}" in told:
        marks.insert(0, _handle(f"error_max, {EVERY}", "black", MARKS["error_max"], hollow=True))
    used = {family.partition(", ")[2] for family in families}
    colours: list[Artist] = [_handle(kind, colour, "s") for kind, colour in KINDS.items() if kind in used]
    figure.legend(handles=marks, loc="lower center", bbox_to_anchor=(0.5, 0.07), ncols=5, fontsize=9)
    figure.legend(handles=colours, loc="lower center", bbox_to_anchor=(0.5, 0.01), ncols=6, fontsize=9)


def _handle(label: str, colour: str, mark: str, *, hollow: bool = False) -> Line2D:
    face = "white" if hollow else colour
    size = 11 if mark == "*" else 7
    return Line2D([], [], color=colour, marker=mark, ls="none", ms=size, markerfacecolor=face, label=label)
