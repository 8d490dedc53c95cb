"""The ways of answering that `benchmarks/real_model.py` compares."""

from __future__ import annotations

from dataclasses import dataclass

from indexes.retrieval import Dipr, Exact, TopK, TopP
from query_optimizer.query_options import Hints, QueryOptions

ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1)
ALPHAS = (0.05, 0.012, 0.003)
KINDS = ("flat", "coarse-bounds", "coarse-means", "coarse-clusters", "hnsw")
RANKED = ("flat", "coarse-clusters")
"""Kinds on which TopK, TopP and bounds are measured."""
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


def ways(quick: bool) -> list[Way]:
    """All of them, the reference first. quick: one or two of each family."""
    errors = ERRORS[1::3] if quick else ERRORS
    found = [EXACT, *(Way(f"error_max {error:g}", "error_max", QueryOptions(error_max=error), True) for error in errors)]
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
    return found


def kinds_of(chosen: list[Way]) -> list[str]:
    """The kinds of index that ways name, in the order of KINDS."""
    named = {way.options.hints.index for way in chosen}
    return [kind for kind in KINDS if kind in named]
