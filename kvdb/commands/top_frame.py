"""One frame of `kvdb top`: text that says what a server does now."""

from collections.abc import Sequence
from math import inf
from time import time

from kvdb.commands.metrics_text import Samples

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
BAR = 24
RULES_MAX = 6


def frame(before: Samples, now: Samples, seconds: float, latencies: Sequence[float], marks: str) -> str:
    """The lines of a frame of this moment. before: the samples of `seconds` ago, from which rates come; none and 0 for the start
    of the server. latencies: the mean seconds of a decode step in the last intervals. marks: from the least to the most."""
    version = next(iter(now.by("kvdb_build_info", "version")), "?")
    up = max(0.0, time() - now.sum("kvdb_start_time_seconds"))
    attends = _rates(before, now, "kvdb_attends_total", "rule", seconds or up or 1.0)
    tokens = now.sum("kvdb_context_tokens_total") - before.sum("kvdb_context_tokens_total")
    retrieved = now.sum("kvdb_retrieved_tokens_total") - before.sum("kvdb_retrieved_tokens_total")
    sessions, contexts = now.sum("kvdb_sessions_open"), now.sum("kvdb_contexts")
    p50, p99 = (_time(quantile(before, now, share)) for share in (0.5, 0.99))
    lines = [
        f"kvdb {version}, up {_duration(up)}: {_several(sessions, 'session')}, {_several(contexts, 'context')}",
        f"{sum(attends.values()):,.0f} attends/s, {retrieved / tokens if tokens else 1:.1%} of their tokens retrieved",
        "",
        *_tiers(now, marks),
        "",
        f"decode step p50 {p50}, p99 {p99}  {sparkline(latencies, marks)}",
        "of a query: " + (_stages(before, now) or "none since the last look"),
        "plans: " + (", ".join(f"{rule} {rate:,.0f}/s" for rule, rate in _largest(attends)) or "none since the last look"),
    ]
    events = _rates(before, now, "kvdb_events_total", "event", 1.0)
    told = ", ".join(f"{event} {number:,.0f}" for event, number in _largest(events))
    return "\n".join([*lines, f"since the last look: {told or 'nothing happened'}"])


def sparkline(values: Sequence[float], marks: str) -> str:
    """A mark for each value, from 0 to the largest."""
    largest = max(values, default=0.0)
    return "".join(marks[min(len(marks) - 1, int(value / largest * len(marks)))] if largest else marks[0] for value in values)


def mean_step(before: Samples, now: Samples) -> float:
    """The mean seconds of a decode step between two moments, 0 without one."""
    steps = now.sum("kvdb_decode_seconds_count") - before.sum("kvdb_decode_seconds_count")
    return (now.sum("kvdb_decode_seconds_sum") - before.sum("kvdb_decode_seconds_sum")) / steps if steps > 0 else 0.0


def quantile(before: Samples, now: Samples, share: float) -> float:
    """The bound of the bucket of decode steps in which that share of them is reached, in seconds; 0 without one."""
    old = before.by("kvdb_decode_seconds_bucket", "le")
    found = {float(le): value - old.get(le, 0.0) for le, value in now.by("kvdb_decode_seconds_bucket", "le").items()}
    total = found.get(inf, 0.0)
    return min((le for le, value in found.items() if value >= share * total), default=0.0) if total > 0 else 0.0


def _tiers(now: Samples, marks: str) -> list[str]:
    used, limits = now.by("kvdb_tier_used_bytes", "tier"), now.by("kvdb_tier_limit_bytes", "tier")
    lines = []
    for tier, nbytes in sorted(used.items()):
        limit = limits.get(tier, 0.0)
        filled = round(BAR * min(1.0, nbytes / limit)) if limit else 0
        bar = f"[{marks[-1] * filled}{' ' * (BAR - filled)}] {nbytes / limit:4.0%} of {_size(limit)}" if limit else "no limit"
        lines.append(f"{tier:>5} {_size(nbytes):>10} {bar}")
    return lines or ["no tier holds anything yet"]


def _stages(before: Samples, now: Samples) -> str:
    spent = _rates(before, now, "kvdb_attend_stage_seconds_total", "stage", 1.0)
    queries = now.sum("kvdb_attends_total") - before.sum("kvdb_attends_total")
    return ", ".join(f"{stage} {_time(seconds / queries)}" for stage, seconds in spent.items()) if queries > 0 else ""


def _rates(before: Samples, now: Samples, name: str, label: str, seconds: float) -> dict[str, float]:
    """What a counter grew by in a second; a server that was started anew began at 0."""
    old = before.by(name, label)
    grown = {key: value - old.get(key, 0.0) for key, value in now.by(name, label).items()}
    return {key: value / seconds for key, value in grown.items() if value > 0}


def _largest(rates: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(rates.items(), key=lambda one: -one[1])[:RULES_MAX]


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def _time(seconds: float) -> str:
    if seconds == inf:
        return "over 50 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _several(number: float, what: str) -> str:
    return f"{number:,.0f} {what}" + ("" if number == 1 else "s")
