"""The picture of `benchmarks/blend_quality.py`: accuracy over the share of tokens that is recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")  # before pyplot, so that no display is looked for

import matplotlib.pyplot as plt

# Okabe and Ito's colours, told apart with every kind of colour vision; marks differ as well.
STYLES = {"deviation": ("#0072B2", "o"), "first": ("#E69F00", "D"), "random": ("#009E73", "^")}
NAMES = {"deviation": "largest deviation", "first": "first of each chunk", "random": "at random"}
KINDS = {
    "chunk": "fact within a chunk",
    "border": "fact across a border",
    "heading": "record under a heading\nof an earlier chunk",
}
Row = dict[str, Any]


def draw(rows: list[Row], path: Path) -> None:
    """A panel for each kind of question, a line for each strategy; full prefill as a level."""
    mine = [row for row in rows if row["benchmark"] == "blend_quality"]
    full = next(row for row in mine if row["way"] == "full")
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, panels = plt.subplots(1, len(KINDS), figsize=(11, 3.8), sharey=True)
    for axes, (kind, title) in zip(panels, KINDS.items(), strict=True):
        axes.axhline(100 * full[kind], color="black", lw=1, ls="--", label="full prefill")
        for strategy, (colour, mark) in STYLES.items():
            points = [(float(ratio), 100 * row[kind]) for row in mine for name, _, ratio in [row["way"].partition(" ")]
                      if name == strategy and _is_number(ratio)]  # fmt: skip
            if strategy != "deviation":  # none and all are the same for every strategy
                points += [(float(r), 100 * row[kind]) for row in mine for r in ("0.0", "1.0") if row["way"] == f"deviation {r}"]
            x, y = zip(*sorted(points), strict=True)
            axes.plot([100 * value for value in x], y, color=colour, marker=mark, ms=5, label=NAMES[strategy])
        axes.axvline(15, color="grey", lw=1, ls=":", label="15 %")
        axes.set_title(f"{title} ({full[f'{kind}_asked']} questions)", fontsize=10)
        axes.set_xlabel("tokens recomputed, %")
    panels[0].set_ylabel("answers right, %")
    panels[0].set_ylim(-2, 103)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
