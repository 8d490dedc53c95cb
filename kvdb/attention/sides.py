"""Parts that are answered elsewhere while the CPU answers its own; both states merge.

What a bound on the missed mass asks for composes: where neither side misses more than a share of its own mass, both together miss
no more than that share of all. So each side reads on by itself.
"""

from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from indexes.base import Float32
from indexes.retrieval import Retrieval
from indexes.widen import widened
from kvdb.attention.away import Answer, Away, Pending
from kvdb.attention.execute import Reading
from kvdb.attention.sections import Sections
from kvdb.attention.sparse import Question, exact, sparse
from kvdb.attention.state import AttentionState, merge


def on_both_sides(
    question: Question, sections: Sections, away: Away, retrieval: Retrieval, pending: Pending | None = None
) -> tuple[AttentionState, Reading]:
    """The attention of a question over all of its run. away: that of the sections; pending: what was launched of it already.

    Both sides start at once, so neither knows the other's largest score: each retrieves what its own asks for, which is never
    less than what all of it asks for. Raises AwayFailed.
    """
    started = perf_counter_ns()
    pending = pending or away.launch(question.q, None)
    answered = sparse(question, sections, retrieval) if question.searches(sections) else exact(question, sections)
    here, reading = answered
    answer = pending.result()
    limit = question.wanted.missed_mass_max
    if limit is not None:
        answer = _read_on(away, question, retrieval, answer, limit)
    state = merge([here, answer.state])
    out = state.out.astype(question.q.dtype, copy=False)
    joined = _joined(reading, here.lse, answer, state.lse)
    return AttentionState(out, state.lse), replace(joined, kernel_ns=perf_counter_ns() - started)


def _read_on(away: Away, question: Question, retrieval: Retrieval, answer: Answer, limit: float) -> Answer:
    """The first answer that misses no more than `limit` of its own mass for certain."""
    for attempt, _ in widened(retrieval, question.run.tokens):
        if _shares(answer.missed_bound, answer.state.lse).max(initial=0.0) <= limit:
            break
        answer = away.launch(question.q, attempt).result()
    return answer


def _joined(reading: Reading, here: Float32, answer: Answer, lse: Float32) -> Reading:
    """What both sides read and missed. Of the bounds on the shares, which are means over the queries here, their sum holds, as a
    side's share of all is no more than its share of its own."""
    missed, bound = (_shares(log, answer.state.lse) for log in (answer.missed, answer.missed_bound))
    weight = np.exp(np.where(np.isfinite(here), here - lse, -np.inf))
    mine = reading.missed * float(weight.mean()) + float((missed * (1 - weight)).mean())
    bound_max = max(reading.missed_bound_max, float(bound.max(initial=0.0)))
    return replace(
        reading,
        scanned=reading.scanned + answer.scanned,
        retrieved=reading.retrieved + answer.retrieved,
        nbytes=reading.nbytes + answer.nbytes,
        missed=mine,
        missed_bound=min(bound_max, reading.missed_bound + float(bound.mean())),
        missed_bound_max=bound_max,
        lse=lse,
    )


def _shares(log: Float32, lse: Float32) -> Float32:
    """Of the mass of one side, what the logarithm of a missed sum comes to beside the sum that was read."""
    finite = np.isfinite(log)
    missed = np.where(finite, log, -np.inf).astype(np.float64)
    shares = np.exp(np.where(finite, missed - np.where(finite, np.logaddexp(missed, lse), 0), -np.inf))
    return np.where(np.isposinf(log), 1.0, shares).astype(np.float32)
