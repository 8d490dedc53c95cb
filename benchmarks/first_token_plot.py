"""The picture of the first page: the first token of vLLM with and without kvdb, out of the table in benchmarks/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # before pyplot, so that no display is looked for

import matplotlib.pyplot as plt

from benchmarks.harness import argument_parser

FOLDER = Path(__file__).parent
COLOURS = {"plain vLLM": "#999999", "vLLM over kvdb, prompt found": "#0072B2"}
ROW = re.compile(
    r"^\| (?P<tokens>[\d,]+) \| (?P<dtype>float32)(, a quiet machine)? \| (?P<plain>[\d.]+) \(.*?\) \| (?P<found>[\d.]+) \(.*?\) "
    r"\| \*\*(?P<sooner>[\d.]+)x"
)


def rows() -> list[re.Match[str]]:
    """The rows below "vLLM's first token" whose processes were bound alike, but for those of a machine that was busier."""
    section = (FOLDER / "README.md").read_text().partition("## vLLM's first token\n")[2].partition("\n## ")[0]
    return [found for line in section.splitlines() if (found := ROW.match(line))]


def draw(path: Path) -> None:
    """A pair of bars for each prompt and dtype, and how many times sooner the first token comes."""
    table = rows()
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, axes = plt.subplots(figsize=(8, 3))
    for offset, (label, colour), column in zip((-0.2, 0.2), COLOURS.items(), ("plain", "found"), strict=True):
        axes.barh([y + offset for y in range(len(table))], [float(row[column]) for row in table], 0.38, color=colour, label=label)
    for y, row in enumerate(table):
        axes.text(float(row["found"]) + 0.3, y + 0.2, f"{row['found']} s, {row['sooner']} times sooner", va="center")
    axes.set_yticks(range(len(table)), [f"{row['tokens']} tokens\n{row['dtype']}" for row in table], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    draw(FOLDER / "plots" / "first-token.png")
