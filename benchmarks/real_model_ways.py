"""The ways of answering that `benchmarks/real_model.py` compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from indexes.retrieval import Dipr, Exact, TopK, TopP
from kvdb.indexing import background_time
from kvdb.session import audits
from query_optimizer.query_options import Hints, QueryOptions

ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1)
ALPHAS = (0.05, 0.012, 0.003)
KINDS = ("flat", "quantized", "coarse-bounds", "coarse-means", "coarse-clusters", "hnsw")
RANKED = ("flat", "quantized", "coarse-clusters")
"""Kinds on which TopK, TopP and bounds are measured."""
ESTIMATING = ("quantized", "coarse-clusters")
"""Kinds that are measured with an estimate of the rest."""
FASTER = 0.1
"""The time that a search counts for at any price, relative to its own."""
TOP_K, TOP_P, MISSED = (64, 256), (0.9, 0.99), (0.1, 0.01)


@dataclass(frozen=True)
class Way:
    """options: what each query of a row carries. family: what it is called in the picture. learns: whether it stands on evidence,
    which belongs to what is stored, so that it has a database of its own."""

    name: str
    family: str
    options: QueryOptions
    learns: bool = False
    noise: float = 0.0


EXACT = Way("exact", "exact", QueryOptions(Exact()))


def ways(quick: bool, *, at_any_price: bool = False) -> list[Way]:
    """All of them, the reference first. quick: one or two of each family. at_any_price: budgets alone, of which each is named for
    using every way that is proven (`at_any_price`)."""
    errors = ERRORS[1::3] if quick else ERRORS
    price = ", every proven way" if at_any_price else ""
    found = [EXACT]
    found += [Way(f"error_max {error:g}{price}", f"error_max{price}", QueryOptions(error_max=error), True) for error in errors]
    if at_any_price:
        return found
    found += [Way(f"noise {error:g}", "noise", EXACT.options, noise=error) for error in errors]
    for kind in RANKED if quick else KINDS:
        hints = Hints(index=kind)
        for alpha in ALPHAS[1:2] if quick else ALPHAS:
            found.append(Way(f"Dipr({alpha:g}) {kind}", f"Dipr, {kind}", QueryOptions(Dipr(alpha), hints=hints)))
    for kind in RANKED[1:] if quick else RANKED:
        hints = Hints(index=kind)
        found += [Way(f"TopK({k}) {kind}", f"TopK, {kind}", QueryOptions(TopK(k), hints=hints)) for k in TOP_K]
        found += [Way(f"TopP({p:g}) {kind}", f"TopP, {kind}", QueryOptions(TopP(p), hints=hints)) for p in TOP_P]
        for mass in MISSED:
            options = QueryOptions(max_missed_mass=mass, hints=hints)
            found.append(Way(f"max_missed_mass {mass:g} {kind}", f"max_missed_mass, {kind}", options))
    for kind in ESTIMATING[:1] if quick else ESTIMATING:
        hints = Hints(index=kind)
        for k in TOP_K:
            options = QueryOptions(TopK(k), estimate_tail=True, hints=hints)
            found.append(Way(f"TopK({k}) and estimate {kind}", f"TopK and estimate, {kind}", options))
        options = QueryOptions(Dipr(ALPHAS[1]), estimate_tail=True, hints=hints)
        found.append(Way(f"Dipr({ALPHAS[1]:g}) and estimate {kind}", f"Dipr and estimate, {kind}", options))
    return found


@contextmanager
def free_audits() -> Iterator[None]:
    """Within it every answer is audited whose ways are still to be proven, whatever that takes."""
    with patch.object(background_time, "SHARE", 1e9), patch.object(audits, "WORTH_SHARE", 0.0):
        yield


@contextmanager
def at_any_price() -> Iterator[None]:
    """Within it audits cost nothing, and searches count for so much faster than they are that every way is used that is proven,
    the fastest of them first.

    What an answer then errs is the most that its budget allows, whatever this machine's times are.
    """
    measured = audits.time_share
    with free_audits(), patch.object(audits, "time_share", lambda *times: FASTER * measured(*times)):
        yield


def kinds_of(chosen: list[Way]) -> list[str]:
    """The kinds of index that ways name, in the order of KINDS."""
    named = {way.options.hints.index for way in chosen}
    return [kind for kind in KINDS if kind in named]
