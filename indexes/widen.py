"""The ever wider retrievals that are tried until the bound on the missed mass is small enough."""

from collections.abc import Iterator

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

ALPHA_MIN = 1e-9
"""The least alpha, and the least 1 - p, before everything is read."""
FACTOR = 8
"""How much wider each retrieval is than the one before."""


def widened(retrieval: Retrieval, tokens: int) -> Iterator[tuple[Retrieval, bool]]:
    """Yield `retrieval` itself, then the same with a tight bound, then ever wider ones, and at last Exact().

    tokens: the number of tokens searched. Each retrieval comes with whether its bound is to be tight.
    """
    yield retrieval, False
    while not isinstance(retrieval, Exact):
        yield retrieval, True
        retrieval = _wider(retrieval, tokens)
    yield retrieval, False


def _wider(retrieval: Retrieval, tokens: int) -> Retrieval:
    match retrieval:
        case Dipr(alpha) if alpha / FACTOR >= ALPHA_MIN:
            return Dipr(alpha / FACTOR)
        case TopK(k) if k * FACTOR < tokens:
            return TopK(k * FACTOR)
        case TopP(p) if (1 - p) / FACTOR >= ALPHA_MIN:
            return TopP(1 - (1 - p) / FACTOR)
    return Exact()
