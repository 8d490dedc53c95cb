"""The audited errors of the answers over one segment, by layer and query head."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.way_record import WayEvidence
from kvdb.types import Float32

Int64 = npt.NDArray[np.int64]


def audited_errors(evidence: Evidence, heads: Sequence[int]) -> tuple[Int64, Float32]:
    """How many answers were audited, int64, and what the 95th percentile of their error does not exceed, float32, infinite where
    the audits are too few to say; both `[layers, q_heads]` and read-only.

    heads: the query heads of each layer. The numbers of a query head are those of its KV head: of the way with the smallest error
    among the ways that were tried.
    """
    shape = len(heads), max(heads)
    audits, errors = np.zeros(shape, np.int64), np.full(shape, np.inf, np.float32)
    for layer in evidence.layers():
        ways = evidence.of(layer).values()
        if ways:
            counts, bounds = _least(ways)
            group = heads[layer] // len(counts)
            audits[layer, : heads[layer]], errors[layer, : heads[layer]] = np.repeat(counts, group), np.repeat(bounds, group)
    audits.flags.writeable = errors.flags.writeable = False
    return audits, errors


def _least(ways: Collection[WayEvidence]) -> tuple[Int64, npt.NDArray[np.float64]]:
    """The audits and the bound of the way with the smallest bound, `[kv_heads]` each; without any bound, of the way with the most
    audits."""
    bounds = np.stack([way.bounds for way in ways])
    audits = np.stack([way.audits for way in ways])
    best = np.lexsort((-audits, bounds), axis=0)[0]
    heads = np.arange(len(best))
    return audits[best, heads], bounds[best, heads]
