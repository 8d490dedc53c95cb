"""Statistics of a context as a picture: layers down, heads across."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvdb.commands.measures import FORMS, LOGARITHMIC, LOWEST, TITLES
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.types import ContextInfo, ContextStatistics
from kvdb.types.measures import overall

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL_INCHES = 0.16
PANEL_INCHES = (3.6, 8.0)  # the least and the most that a side of a panel measures
LABELLED_CELLS_MAX = 64
NAME_LENGTH_MAX = 40
DPI = 130


def draw(info: ContextInfo, statistics: ContextStatistics, measures: Sequence[str], path: Path) -> None:
    """Draw one panel for each measure into a PNG file.

    Raises Unsupported where matplotlib is not installed, InvalidArgument for a path that cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # only this needs it; pyplot would look for a display
    except ModuleNotFoundError:
        raise Unsupported("a heat map needs matplotlib, which is not installed; pip install 'kvdb[plots]'") from None
    least, most = PANEL_INCHES
    heads = max(kept.shape.q_heads for kept in info.spec.kept)
    width, height = (min(max(CELL_INCHES * n, least), most) for n in (heads, info.spec.layers))
    across = min(len(measures), 2)
    down = -(-len(measures) // across)
    figure = Figure(figsize=(across * (width + 1.2), down * (height + 0.9) + 0.6), dpi=DPI, layout="constrained")
    name = info.name if len(info.name) <= NAME_LENGTH_MAX else f"{info.name[:NAME_LENGTH_MAX]}…"
    queries = max(int(segment.queries.max()) for segment in statistics.segments)
    audits = max(int(segment.audits.max()) for segment in statistics.segments)
    values = [overall(statistics, measure) for measure in measures]
    grey = "\ngrey: not known" if np.isnan(values).any() else ""
    counted = [f"{count:,} {what}" for count, what in ((queries, "queries observed"), (audits, "audits")) if count]
    title = f"{name}\n{info.tokens:,} tokens, up to {' and '.join(counted)} a head{grey}"
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, measure, shown in zip(panels, measures, values, strict=False):
        _panel(panel, measure, shown)
    for panel in panels[len(measures) :]:
        panel.set_axis_off()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name may hold characters that no font has
            figure.savefig(path, format="png")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror or error}") from None


def _panel(panel: "Axes", measure: str, values: npt.NDArray[np.float64]) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    norm = LogNorm(LOWEST, 1, clip=True) if measure in LOGARITHMIC else Normalize(0, 1)
    panel.set_facecolor("0.85")  # where nothing is known
    image = panel.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    panel.set_title(TITLES[measure], fontsize=9)
    panel.set_xlabel("query head")
    panel.set_ylabel("layer")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    assert panel.figure is not None
    panel.figure.colorbar(image, ax=panel, format=lambda value, _: f"{100 * value:g}%")
    if values.size <= LABELLED_CELLS_MAX:
        for (layer, head), value in np.ndenumerate(values):
            text = "" if np.isnan(value) else FORMS[measure].format(value)
            dark = np.isnan(value) or float(norm(value)) > 0.5
            panel.text(head, layer, text, ha="center", va="center", fontsize=8, color="black" if dark else "white")
