"""Measures the quality of an index's results against the exact oracle: recall, mass, output error, reads, time."""

from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import numpy as np

from indexes.base import Index, Queries, SearchResult
from indexes.oracle import Oracle, merged
from indexes.retrieval import Retrieval


@dataclass(frozen=True)
class RecallReport:
    """The measurements of one index, one retrieval and a batch of queries.

    Shares are in [0, 1]; means run over the rows, which are q_heads x queries.

    visible: tokens that a row sees, window included. relevant: tokens that the retrieval asks for, outside the window. recall,
    recall_min: the share of the relevant tokens that was found, mean and least. mass: the share of the softmax mass that found
    tokens and window carry. error: the error of the attention output over found tokens and window, relative to the output over
    everything visible, in the L2 norm over all rows; error_max: the error of the worst row. error_with_tail: the error with the
    index's estimate of the rest merged in, None where it gave none. found: tokens found for each row. scanned: keys looked at for
    each KV head. nbytes: bytes read by one call; index_nbytes: the memory of the index. seconds: the median time of one call.
    missed: the true share of the mass that was missed; missed_estimate: the index's estimate of it; missed_bound: the index's
    bound of it. bound_valid: the share of rows whose bound holds. bound_ratio: the median of the bound over the truth, for rows
    that missed anything.
    """

    kind: str
    retrieval: str
    tokens: int
    rows: int
    visible: float
    relevant: float
    recall: float
    recall_min: float
    mass: float
    error: float
    error_max: float
    error_with_tail: float | None
    found: float
    found_share: float
    scanned: float
    scanned_share: float
    nbytes: int
    index_nbytes: int
    seconds: float
    missed: float
    missed_estimate: float
    missed_bound: float
    bound_valid: float
    bound_ratio: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        tail = "" if self.error_with_tail is None else f" ({100 * self.error_with_tail:.3f} % with tail)"
        return (
            f"{self.kind:<16} {self.retrieval:<12} {self.tokens:>8} tokens  recall {self.recall:.4f}  mass {self.mass:.4f}"
            f"  error {100 * self.error:.3f} %{tail}  found {self.found:.0f} ({100 * self.found_share:.2f} %)"
            f"  scanned {self.scanned:.0f} ({100 * self.scanned_share:.2f} %)  read {self.nbytes / 2**20:.2f} MiB"
            f"  {1e3 * self.seconds:.3f} ms  missed {self.missed:.1e} <= {self.missed_bound:.1e}"
            f" ({100 * self.bound_valid:.0f} % valid, x{self.bound_ratio:.2f})"
        )


def measure(
    index: Index,
    queries: Queries,
    retrieval: Retrieval,
    *,
    window: tuple[int, int] = (0, 0),
    repetitions: int = 5,
    estimate_tail: bool = False,
    oracle: Oracle | None = None,
) -> RecallReport:
    """Search `repetitions` times and judge the last search. window: as Oracle takes it. oracle: an Oracle made of the same
    arguments, if there is one already.

    Raises ValueError where the search does.
    """
    oracle = oracle or Oracle(index.blocks, queries, window)
    seconds = []
    for _ in range(repetitions):
        started = perf_counter()
        result = index.search(oracle.queries, retrieval, estimate_tail=estimate_tail)
        seconds.append(perf_counter() - started)
    return report(index, result, retrieval, oracle, median(seconds))


def report(index: Index, result: SearchResult, retrieval: Retrieval, oracle: Oracle, seconds: float) -> RecallReport:
    """The measurements of one search that took `seconds`."""
    judged, error = oracle.judge(result, retrieval), None
    visible, scanned = float(oracle.visible.mean()), result.scanned / index.blocks.kv_heads
    if result.tail is not None:
        error = oracle.error_of_all(merged(judged, result.tail))
    some = judged.missed > -np.inf
    return RecallReport(
        kind=index.kind,
        retrieval=str(retrieval),
        tokens=index.blocks.tokens,
        rows=len(judged.recall),
        visible=visible,
        relevant=float(np.mean([len(ids) for ids in oracle.relevant_tokens(retrieval)])),
        recall=float(judged.recall.mean()),
        recall_min=float(judged.recall.min()),
        mass=float(judged.mass.mean()),
        error=oracle.error_of_all(judged.out),
        error_max=float(oracle.error(judged.out).max()),
        error_with_tail=error,
        found=len(result.ids) / len(judged.recall),
        found_share=len(result.ids) / max(float(oracle.visible.sum()), 1),
        scanned=scanned,
        scanned_share=scanned / max(visible, 1),
        nbytes=result.nbytes,
        index_nbytes=index.nbytes,
        seconds=seconds,
        missed=float(oracle.share(judged.missed).mean()),
        missed_estimate=float(oracle.share(judged.missed_estimate).mean()),
        missed_bound=float(np.minimum(oracle.share(judged.missed_bound), 1).mean()),
        bound_valid=float(judged.bound_holds.mean()),
        bound_ratio=float(np.median(np.exp(judged.missed_bound - judged.missed)[some])) if some.any() else 1.0,
    )
