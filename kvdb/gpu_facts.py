"""What the optimizer is told of parts that lie on the GPU: what reading and searching them takes there."""

from indexes.demand import GUESS
from indexes.retrieval import TopK
from kvdb.gpu.side import COARSE, FLAT, kinds_for
from kvdb.parts import Part
from kvdb.storage.slot import BOUND_TOKENS
from kvdb.types import ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import IndexFacts
from query_optimizer.wanted import Wanted

CANDIDATES = 4.0
"""Times as many tokens as are wanted pass the codes: a guess, until it is measured on a card."""
COARSE_SHARE = 0.02
"""Of the tokens that pages are picked of where no number is named, as the rule `budget_fits` has it."""


def exact_seconds(spec: ModelSpec, gpu: GpuMachine, tokens: int, new: int) -> float:
    """Of a call that reads so many tokens of one layer."""
    return gpu.exact_seconds(tokens * spec.token_nbytes, 2.0 * tokens * spec.q_heads * new * spec.head_dim)


def indexes(spec: ModelSpec, gpu: GpuMachine, wanted: Wanted, part: Part, new: int) -> tuple[IndexFacts, ...]:
    """What can be searched there: the index pages come with the copies. Nothing of what is overlaid, or for several queries."""
    if new > 1 or part.overlaid or not part.span.tokens:
        return ()
    tokens = part.span.tokens
    k = min(wanted.retrieval.k, tokens) if isinstance(wanted.retrieval, TopK) else COARSE_SHARE * tokens
    # Codes of half a byte a dimension with two factors; of a page the least and the largest of each channel, in 16 bits.
    code_nbytes = tokens * spec.kv_heads * (spec.head_dim / 2 + 4)
    bound_nbytes = tokens / BOUND_TOKENS * spec.kv_heads * 4 * spec.head_dim
    read = {FLAT: (code_nbytes, CANDIDATES * GUESS), COARSE: (bound_nbytes, k)}
    found = []
    for kind in kinds_for(wanted):
        scanned, attended = read[kind]
        selected = min(attended, tokens) * spec.token_nbytes
        seconds = gpu.search_seconds(scanned, selected)
        found.append(IndexFacts(kind, seconds, scanned + selected, 0, seconds, ranks=kind == COARSE))
    return tuple(found)
