"""The error budget of one layer, from the evidence of the keys that may be searched."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.way_record import WayEvidence
from kvdb.types import Float32
from query_optimizer.facts import Facts, IndexFacts
from query_optimizer.head_shares import Joint, share_budget
from query_optimizer.ways import LayerBudget, Way, WayFacts, candidates

QUERIES_MAX = 16
"""More queries in one call are a prefill, which is exact."""

GUARD_SHARE = 0.1
"""What a head may be estimated to miss in any case, relative to the error that it may have."""


def layer_budget(facts: Facts, evidence: Sequence[Mapping[Way, WayEvidence]], error_max: float, trial: Way | None) -> LayerBudget:
    """How the heads of a layer are to be answered within error_max. evidence: of each part that may be searched."""
    kv_heads = facts.kv_heads
    if facts.new_tokens > QUERIES_MAX:
        error_max = 0.0
    ways = () if error_max <= 0 else tuple(_way_facts(way, evidence, kv_heads) for way in _ways(facts))
    rows = [{way: Joint(known.rows, known.habit) for way, known in one.items()} for one in evidence]
    heads = share_budget(error_max, ways, kv_heads, rows)
    return LayerBudget(error_max, ways, heads, facts.read_seconds, trial)


def refreshed(budget: LayerBudget, evidence: Sequence[Evidence], layer: int) -> LayerBudget:
    """The budget with what is known of its ways now; the heads are answered as before."""
    known = [one.of(layer) for one in evidence]
    return replace(budget, ways=tuple(_way_facts(facts.way, known, len(budget.heads)) for facts in budget.ways))


def guards_of(budget: LayerBudget, evidence: Sequence[Mapping[Way, WayEvidence]]) -> Float32 | None:
    """What each KV head may be estimated to miss, as the logarithm of a share of the softmax mass: float32 `[kv_heads]`; None for
    answers that are only compared. Beyond it the evidence says nothing, and the head is read whole."""
    if budget.trial is not None or not any(share.way is not None for share in budget.heads):
        return None
    guards = np.full(len(budget.heads), np.inf, np.float32)
    for head, share in enumerate(budget.heads):
        if share.way is not None:
            seen = min(known[share.way].guards[head] for known in evidence)
            guards[head] = max(seen, np.log(GUARD_SHARE * share.error_max))
    return guards


def ranges_of(budget: LayerBudget, evidence: Sequence[Mapping[Way, WayEvidence]], q_heads: int) -> Float32 | None:
    """The least and the largest of each sign (`kvdb.attention.signs`) for which each head's way was proven: float32 `[2, SIGNS,
    q_heads]`; None for answers that are only compared. Outside of them the evidence says nothing, and the head is read whole."""
    if budget.trial is not None or not any(share.way is not None for share in budget.heads):
        return None
    ranges = np.full((2, SIGNS, q_heads), np.inf, np.float32)
    ranges[0] = -np.inf
    group = q_heads // len(budget.heads)
    for head, share in enumerate(budget.heads):
        if share.way is not None:
            rows = slice(head * group, (head + 1) * group)
            seen = np.stack([known[share.way].ranges[..., rows] for known in evidence])
            ranges[0, :, rows], ranges[1, :, rows] = seen[:, 0].max(axis=0), seen[:, 1].min(axis=0)
    return ranges


def _ways(facts: Facts) -> tuple[Way, ...]:
    """Every way in which the indexes of these parts can answer, in the order in which ways are tried."""
    asked = facts.hints.index
    kinds: dict[str, IndexFacts] = {}
    for part in facts.parts:
        for index in facts.affordable(part) if part.searchable else ():
            if asked in {None, index.kind}:
                kinds.setdefault(index.kind, index)
    fastest_first = sorted(kinds.values(), key=lambda index: index.sharp_seconds)
    return candidates([(index.kind, index.estimates_tail, index.ranks_only) for index in fastest_first])


def _way_facts(way: Way, evidence: Sequence[Mapping[Way, WayEvidence]], kv_heads: int) -> WayFacts:
    """What is known of a way: of several parts, what is known of the worst."""
    known = [one[way] for one in evidence if way in one]
    if len(known) < len(evidence) or not known:
        return WayFacts.unknown(way, kv_heads)
    shares = [one.time_share for one in known if one.time_share is not None]
    return WayFacts(
        way=way,
        audits=_worst(np.minimum, [one.audits for one in known]),
        bounds=_worst(np.maximum, [one.bounds for one in known]),
        least=_worst(np.maximum, [one.least for one in known]),
        given_up=_worst(np.maximum, [one.given_up for one in known]),
        waits=_worst(np.maximum, [one.waits for one in known]),
        time_share=max(shares) if shares else None,
    )


def _worst(worse: np.ufunc, known: list[npt.NDArray[Any]]) -> tuple[Any, ...]:
    """The worst of these arrays in each place, `[kv_heads]` each."""
    return tuple(reduce(worse, known).tolist())
