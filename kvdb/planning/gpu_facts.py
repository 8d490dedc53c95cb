"""Gathers the facts of parts on the GPU: how long it takes to read and to search them there."""

from indexes.retrieval import TopK
from indexes.selectivity import GUESS
from kvdb.gpu.interface import COARSE, FLAT, searchable_kinds
from kvdb.planning.parts import Part
from kvdb.storage.slot import BOUND_TOKENS
from kvdb.types import LayerShape
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import IndexFacts
from query_optimizer.query_options import QueryOptions

CANDIDATES = 4.0
"""The number of tokens that pass the codes for each token that is in range: a guess until it is measured on a card."""
COARSE_SHARE = 0.02
"""The share of the tokens that coarse pages are picked for where no number is named, the same as of the rule `budget_fits`."""


def exact_seconds(shape: LayerShape, gpu: GpuMachine, tokens: int, new: int) -> float:
    """Seconds of a call of `new` queries that reads `tokens` tokens of one layer."""
    return gpu.exact_seconds(tokens * shape.token_nbytes, 2.0 * tokens * shape.q_heads * new * shape.head_dim)


def indexes(shape: LayerShape, gpu: GpuMachine, options: QueryOptions, part: Part, new: int) -> tuple[IndexFacts, ...]:
    """The indexes of a part, which come with its copies. There are none for a part with overlaid tokens, or for several
    queries."""
    if new > 1 or part.overlaid or not part.span.tokens:
        return ()
    tokens = part.span.tokens
    k = min(options.retrieval.k, tokens) if isinstance(options.retrieval, TopK) else COARSE_SHARE * tokens
    # A code has half a byte for each dimension, and two factors; a page has the smallest and largest value of each channel, in 16
    # bits.
    code_nbytes = tokens * shape.kv_heads * (shape.head_dim / 2 + 4)
    bound_nbytes = tokens / BOUND_TOKENS * shape.kv_heads * 4 * shape.head_dim
    read = {FLAT: (code_nbytes, CANDIDATES * GUESS), COARSE: (bound_nbytes, k)}
    facts = []
    for kind in searchable_kinds(options):
        scanned, attended = read[kind]
        selected = min(attended, tokens) * shape.token_nbytes
        seconds = gpu.search_seconds(scanned, selected)
        facts.append(IndexFacts(kind, seconds, scanned + selected, 0, seconds, ranks_only=kind == COARSE))
    return tuple(facts)
