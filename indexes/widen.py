"""Reading on: the retrievals that follow one another until what was missed is small enough."""

from collections.abc import Iterator

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

ALPHA_MIN = 1e-9
FACTOR = 8


def widened(retrieval: Retrieval, tokens: int) -> Iterator[tuple[Retrieval, bool]]:
    """`retrieval` as asked, then with a tight bound on what it missed, then ever wider ones, and at last everything.

    tokens: how many are searched. Yields each retrieval with whether to spend more on its bound.
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
