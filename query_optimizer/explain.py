"""The text of EXPLAIN: one node for each access, as PostgreSQL draws them, with its details below."""

import re
from collections.abc import Iterator, Sequence

from indexes.retrieval import Retrieval
from query_optimizer.access import WINDOW, Access, Actual, Estimate

FOLDED = 4
"""Equal nodes are drawn as one when they stand in at least this many parts; equal nodes of one part, such as the two ends of its
window, always are."""
RANGES_MAX = 8
FIGURE = re.compile(r"[\d,.]*\d")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def nodes(accesses: Sequence[Access], default: Retrieval, fold: bool) -> Iterator[str]:
    """The lines of all nodes. default: the retrieval that the top of the tree names, so that no node repeats it. fold: whether
    nodes that are alike are drawn as one."""
    one_tier = len(_tiers(accesses)) < 2
    for group in _folded(accesses) if fold else [[access] for access in accesses]:
        first, *rest = _node(group, default, one_tier)
        yield f"  ->  {first}"
        yield from (f"        {line}" for line in rest)


def tiers(accesses: Sequence[Access]) -> Iterator[str]:
    """The line that names the tier, if everything lies in the same one."""
    if len(names := _tiers(accesses)) == 1:
        yield f"Tier: {names.pop()}"


def wished(wishes: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each kind of index that would be used if it were built."""
    for kind in dict.fromkeys(kind for _, kind in wishes):
        yield f"Would Use: {kind} on {_named([part for part, wish in wishes if wish == kind])}, once it stands"


def passed_over(accesses: Sequence[Access]) -> Iterator[str]:
    """The rules that were tried before the ones that fired and the ways of answering that these passed over, and why. Nodes with
    the same reasons share their lines."""
    reasons: dict[object, list[Access]] = {}
    for access in accesses:
        if access.refusals:
            story = tuple((refusal.rule, FIGURE.sub("0", refusal.reason)) for refusal in access.refusals)
            reasons.setdefault((access.rule, access.heads, story), []).append(access)
    for group in reasons.values():
        first = group[0]
        figures = f" (figures of {first.part})" if any(access.refusals != first.refusals for access in group) else ""
        heads = "" if first.all_heads else f", KV heads {ranges(first.heads)} of {first.kv_heads}"
        yield f"Tried Before {first.rule} on {_named([access.part for access in group])}{heads}{figures}:"
        width = max(len(refusal.rule) for refusal in first.refusals)
        yield from (f"  {refusal.rule:{width}}  {refusal.reason}" for refusal in first.refusals)


def costs(estimate: Estimate, actual: Actual | None) -> str:
    """The brackets behind a node: its expected cost, and its actual cost."""
    text = f"(cost={milliseconds(estimate.seconds)} tokens={estimate.tokens:,} bytes={amount(estimate.nbytes)})"
    if actual is None:
        return text
    looked = f" scanned={actual.scanned:,.0f}" if round(actual.scanned) != round(actual.tokens) else ""
    took = f"time={milliseconds(actual.seconds)} tokens={actual.tokens:,.0f}{looked} bytes={amount(actual.nbytes)}"
    return f"{text} (actual {took})"


def milliseconds(seconds: float) -> str:
    """A duration as text for people."""
    return f"{seconds * 1000:,.3f} ms"


def amount(nbytes: float) -> str:
    """A number of bytes as text for people, such as 12.3 MiB."""
    step = 0
    while nbytes >= 1024 and step < len(UNITS) - 1:
        nbytes, step = nbytes / 1024, step + 1
    return f"{nbytes:,.1f} {UNITS[step]}" if step else f"{nbytes:,.0f} B"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, such as 0, 2-5. The middle of many ranges is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts if len(texts) <= RANGES_MAX else [*texts[: RANGES_MAX // 2], "...", texts[-1]])


def _folded(accesses: Sequence[Access]) -> Iterator[list[Access]]:
    """The nodes in groups that are alike, in the order of each group's first node."""
    groups: dict[object, list[Access]] = {}
    for access in accesses:
        groups.setdefault(_likeness(access), []).append(access)
    split: list[list[Access]] = []
    for group in groups.values():
        parts = dict.fromkeys(access.part for access in group)
        apart = [[access for access in group if access.part == part] for part in parts]
        split += [group] if len(parts) >= FOLDED else apart
    place = {id(access): number for number, access in enumerate(accesses)}
    yield from sorted(split, key=lambda group: place[id(group[0])])


def _likeness(access: Access) -> object:
    """A key that is equal for nodes that are shown as one."""
    way = access.index, access.retrieval, access.estimate_tail, access.rule, access.heads
    seen = bool(access.shift), bool(access.overlaid), access.visible < access.stored
    return way, seen, access.tier, access.kept_in, access.format, access.actual is None


def _node(group: Sequence[Access], default: Retrieval, one_tier: bool) -> Iterator[str]:
    """The lines of one node, or of several that are alike."""
    first = group[0]
    parts = {access.part for access in group}
    where = first.part if len(parts) == 1 else f"{len(parts):,} parts: {_named([access.part for access in group])}"
    window = ", window" if first.rule == WINDOW else ""
    path = "Exact Scan" if first.index is None else f"Index Search using {first.index}"
    yield f"{path} on {where}{window}  {costs(_estimates(group), _actuals(group))}"
    if first.index is not None and (first.retrieval != default or first.estimate_tail):
        yield f"Retrieve: {first.retrieval}" + (", the rest estimated" if first.estimate_tail else "")
    if first.visible < first.stored and first.rule != WINDOW:
        visible, stored = sum(access.visible for access in group), sum(access.stored for access in group)
        yield f"Filter: the first {visible:,} of {stored:,} tokens are visible"
    if not first.all_heads:
        yield f"KV Heads: {ranges(first.heads)} of {first.kv_heads}"
    if first.shift:
        least, most = min(access.shift for access in group), max(access.shift for access in group)
        far = f"{least:+,}" if least == most else f"{least:+,} to {most:+,}"
        yield f"Shift: {far} positions, by rotating the query"
    if first.overlaid:
        yield f"Filter: {sum(access.overlaid for access in group):,} recomputed tokens are masked"
    if first.format and first.rule != WINDOW:
        keys, values = max(access.key_error for access in group), max(access.value_error for access in group)
        up_to = "up to " if len(parts) > 1 else ""
        yield f"Format: {first.format}, which changed keys by {up_to}{keys:.2%} and values by {up_to}{values:.2%}"
    if not one_tier or first.kept_in:
        yield f"Tier: {first.tier}" + (f", kept in {first.kept_in}" if first.kept_in else "")
    if left := max((access.actual.left_heads for access in group if access.actual), default=0):
        up_to = "up to " if len(group) > 1 else ""
        yield f"Gave Up: on {up_to}{left} of {len(first.heads)} KV heads, which were read whole"
    if first.rule != WINDOW:
        why = {access.reason for access in group}
        yield f"Rule: {first.rule}" + (f" ({first.reason})" if first.reason and len(why) == 1 else "")


def _named(parts: Sequence[str]) -> str:
    """The names of parts in short: segments by the ranges of their numbers."""
    names = list(dict.fromkeys(parts))
    numbers = sorted(int(name.split()[1]) for name in names if _is_segment(name))
    others = [name for name in names if not _is_segment(name)]
    if len(names) == 1 or not numbers:
        return ", ".join(names)
    return ", ".join([f"segment{'s' if len(numbers) > 1 else ''} {ranges(numbers)}", *others])


def _is_segment(name: str) -> bool:
    kind, _, number = name.partition(" ")
    return kind == "segment" and number.isdecimal()


def _tiers(accesses: Sequence[Access]) -> set[str]:
    return {access.tier for access in accesses}


def _estimates(group: Sequence[Access]) -> Estimate:
    parts = [access.estimate for access in group]
    return Estimate(sum(e.tokens for e in parts), sum(e.nbytes for e in parts), sum(e.seconds for e in parts))


def _actuals(group: Sequence[Access]) -> Actual | None:
    parts = [access.actual for access in group if access.actual is not None]
    if not parts:
        return None
    return Actual(
        tokens=sum(actual.tokens for actual in parts),
        scanned=sum(actual.scanned for actual in parts),
        nbytes=sum(actual.nbytes for actual in parts),
        seconds=sum(actual.seconds for actual in parts),
    )
