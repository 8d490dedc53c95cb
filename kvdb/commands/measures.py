"""How the measures of a context are told to people, also as a map of characters: layers down, query heads across."""

from collections.abc import Sequence

import numpy as np

from kvdb.commands.output import drawn, table
from kvdb.types import ERROR, MEASURES
from kvdb.types.measures import Values

DRAWN: Sequence[str] = (*MEASURES, ERROR)
TITLES = {
    "retrieved": "retrieved\nshare of the searched tokens that a query needs",
    "dense": "dense\nshare of queries that the search gave up",
    "sharpness": "sharpness\nsoftmax weight of the largest token",
    "window_hits": "window hits\nshare of queries whose largest token lies in the window",
    ERROR: "error\nbound on its 95th percentile, by audits",
}
FORMS = {"retrieved": "{:.2%}", "dense": "{:.0%}", "sharpness": "{:.0%}", "window_hits": "{:.0%}", ERROR: "{:.2%}"}
"""How values are written."""
LOGARITHMIC = {"retrieved", ERROR}
"""Small values of these matter, so colours and shades stand for their logarithm."""
LOWEST = 1e-4
"""Where logarithmic colours begin."""
COLUMNS = 100
SHADES, PLAIN_SHADES = "·░▒▓█", ".:+*#"
"""From the smallest to the largest values."""
LIMITS = {"retrieved": (0.001, 0.01, 0.04, 0.2), ERROR: (0.001, 0.003, 0.01, 0.03)}
EVEN = (0.2, 0.4, 0.6, 0.8)
"""What separates the shades, by measure."""
UNKNOWN = "-"


def text_map(measure: str, values: Values) -> str:
    """A row for each layer, a column for each head. values: float64 `[layers, q_heads]`, NaN where nothing is known.

    Numbers where they fit into a hundred columns, shades otherwise, with a line that says what each shade stands for.
    """
    number = len(str(len(values) - 1))
    rows = [[FORMS[measure].format(value) if np.isfinite(value) else UNKNOWN for value in row] for row in values]
    heads = [str(head) for head in range(values.shape[1])]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    title = TITLES[measure].replace("\n", ": ")
    if len("layer") + sum(widths) + 2 * len(widths) <= COLUMNS:
        numbered = [[str(layer), *row] for layer, row in enumerate(rows)]
        return f"{title}\n{table([['layer', *heads], *numbered])}"
    shades, limits = drawn(SHADES, PLAIN_SHADES), LIMITS.get(measure, EVEN)
    lines = [f"{layer:>{number}} {_shaded(row, shades, limits)}" for layer, row in enumerate(values)]
    key = [f"{shade} <{FORMS[measure].format(limit)}" for shade, limit in zip(shades, limits, strict=False)]
    key += [f"{shades[-1]} more", *([f"{UNKNOWN} unknown"] if np.isnan(values).any() else ())]
    return "\n".join([title, *lines, f"layers down, query heads across: {', '.join(key)}"])


def _shaded(values: Values, shades: str, limits: Sequence[float]) -> str:
    places = np.searchsorted(limits, values)
    return "".join(
        shades[place] if np.isfinite(value) else UNKNOWN for value, place in zip(values.tolist(), places.tolist(), strict=True)
    )
