"""Statistics of segments and tiers as text tables."""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt

from kvdb.commands.output import GAP, drawn, table
from kvdb.types import DatabaseStatus, SegmentStatistics, Space, TierStats
from kvdb.types.measures import known

Values = npt.NDArray[np.float64]

SHARES = {"retrieved": "{:.2%}", "sharpness": "{:.3f}", "window_hits": "{:.0%}"}
"""The measures that have a median in the summary, and how their values are written."""
UNKNOWN = "-"


def summary(segment: SegmentStatistics, by: str) -> str:
    """A row for each layer, over its heads, or for each head, over the layers. by: "layer" or "head"."""
    over = "heads" if by == "layer" else "layers"
    columns = {name: known(segment, name) for name in (*SHARES, "dense")}
    queries = segment.queries
    if by == "head":
        columns, queries = {name: values.T for name, values in columns.items()}, queries.T
    titles = [by, "queries", *["median", "min", "max"] * len(SHARES), f"dense {over}"]
    rows = [titles]
    for number in range(len(queries)):
        cells = [str(number), f"{queries[number].max():,}"]
        for name, form in SHARES.items():
            cells += [form.format(value) if np.isfinite(value) else UNKNOWN for value in _spread(columns[name][number])]
        dense = columns["dense"][number]
        heads = int(np.isfinite(dense).sum())
        cells.append(f"{int((dense >= 0.5).sum())} of {heads}" if heads else UNKNOWN)
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, second, *rest = widths
    groups = [sum(rest[i : i + 3]) + 2 * len(GAP) for i in range(0, 3 * len(SHARES), 3)]
    names = [f" {name.replace('_', ' ')} " for name in SHARES]
    line = drawn("─", "-")
    above = [" " * first, " " * second, *(name.center(width, line) for name, width in zip(names, groups, strict=True))]
    return "\n".join([GAP.join(above), table(rows)])


def heads_of_layer(segment: SegmentStatistics, layer: int, kv_heads: int, q_heads: int | None = None) -> str:
    """A row for each query head of one layer. q_heads: fewer than other layers have, None for as many."""
    rows = [["head", "KV head", "queries", *(name.replace("_", " ") for name in SHARES), "dense"]]
    forms = {**SHARES, "dense": "{:.0%}"}
    columns = {name: known(segment, name)[layer] for name in forms}
    q_heads = segment.queries.shape[1] if q_heads is None else q_heads
    for head in range(q_heads):
        values = {name: column[head] for name, column in columns.items()}
        cells = [forms[name].format(value) if np.isfinite(value) else UNKNOWN for name, value in values.items()]
        rows.append([str(head), str(head * kv_heads // q_heads), f"{segment.queries[layer, head]:,}", *cells])
    return table(rows)


def audited(errors: Values) -> str:
    """A line about audits. errors: float64 `[layers, q_heads]`, NaN where they are too few."""
    there = errors[np.isfinite(errors)]
    known_of = f"known of {there.size} of {errors.size} heads"
    if not there.size:
        return f"audited error: {known_of}"
    median, largest = float(np.median(there)), float(there.max())
    return f"audited error at p95: median {median:.2%}, largest {largest:.2%} of a layer's output, {known_of}"


def tiers(stats: Sequence[TierStats]) -> str:
    """A row for each tier and size of block. Bytes are exact."""
    rows = [["tier", "blocks", "of", "block bytes", "bytes", "pinned bytes"]]
    for tier in stats:
        numbers = tier.blocks_used, tier.blocks_total, tier.block_nbytes, tier.nbytes, tier.pinned_nbytes
        rows.append([tier.name, *(f"{number:,}" for number in numbers)])
    return table(rows) if len(rows) > 1 else "no tier holds anything yet"


def used(now: DatabaseStatus) -> str:
    """How a database is used, a line for each thing."""
    indexes = ", ".join(f"{kind} over {segments:,}" for kind, segments in now.indexes.items()) or "none"
    lines = {
        "kvdb": f"{now.version}, up {timedelta(seconds=round(now.uptime_seconds))}",
        "contexts": f"{now.contexts:,}",
        "sessions": f"{now.sessions:,} open",
        "calls": f"{now.calls:,} of {now.calls_max:,} under way, {now.calls_waiting:,} waiting",
        "indexes": f"{indexes}{f'; {now.building:,} to be built' if now.building else ''}",
    }
    return "\n".join(f"{name:<10}{value}" for name, value in lines.items())


def space_taken(space: Space) -> str:
    """What the stored contexts take, in one line."""
    more = f", {space.held / space.reachable - 1:.1%} more" if space.reachable else ""
    return f"contexts hold {space.held:,} bytes of blocks; what they name takes at least {space.reachable:,}{more}"


def _spread(values: Values) -> tuple[float, float, float]:
    """Median, minimum and maximum of the known values; NaN where there are none."""
    there = values[np.isfinite(values)]
    return (float(np.median(there)), float(there.min()), float(there.max())) if len(there) else (np.nan,) * 3
