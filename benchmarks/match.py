"""How long does a prompt of 128K tokens look for its stored prefix among 100,000 contexts, and what does each of them take?

    python -m benchmarks.match [--contexts 100000] [--prompt 131072] [--own 1024]

The contexts of one model stand in the catalogue as those of a store that was just opened do: their tokens and names are in
memory, their keys and values on disk. All begin with the same 2,048 tokens; each goes on with tokens of its own, half of them at
the end of these, half somewhere within them, as conversations behind one system prompt do. Prompts: one that leaves at the shared
tokens, one that a context holds whole, one that is a conversation of 512 turns, each stored when it ended, and one of which
nothing is stored. `bytes_a_block` is what the catalogue, the segments and their token ids take for each 64 stored tokens, as
tracemalloc counts it; `ids_and_tree_bytes_a_block` is the part of it that a match reads.
"""

from __future__ import annotations

import argparse
import tracemalloc

import numpy as np

from benchmarks.harness import argument_parser, machine, measure, report
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.contexts.prefix_tree import PrefixTree
from kvdb.catalog.segments.layout import ContextLayout
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, Views, release_views, visible_tokens
from kvdb.config import StorageConfig
from kvdb.ingest.publisher import NewContext
from kvdb.storage.store import BlockStore
from kvdb.types import ModelSpec, Retention, Tokens

SPEC = ModelSpec("model", layers=1, q_heads=1, kv_heads=1, head_dim=8)
VOCABULARY = 150_000
SHARED, BLOCK, TURNS = 2048, 64, 512
TRACED = 10_000
"""The contexts whose memory is traced, which takes several times as long."""


class Contexts:
    """A catalogue that grows by contexts whose blocks are on disk."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self._blocks = BlockStore(StorageConfig(), None)
        self._names = 0

    def add(self, tokens: Tokens) -> None:
        """A context of these tokens, behind what is stored of them."""
        views = self.catalog.match(SPEC, tokens)
        stored = visible_tokens(views)
        if stored < len(tokens):
            segment = Segment(PackedIds(tokens[stored:]), self._blocks.tables(SPEC), base=stored, standalone=not stored)
            views = (*views, SegmentView(segment, len(segment)))
        self._names += 1
        self.catalog.publish(NewContext(SPEC, f"context {self._names}", Retention()).of(ContextLayout.contiguous(views), tokens))
        self.catalog.take_changed()  # as compaction does

    def close(self) -> None:
        for context in self.catalog.contexts():
            self.catalog.drop(context.name)
        self._blocks.close()


def main() -> None:
    given = arguments()
    rng = np.random.default_rng(0)
    shared = ids(rng, SHARED)
    tracemalloc.start()
    contexts = Contexts()
    contexts.add(shared)
    traced = min(given.contexts, TRACED)
    grow(contexts, rng, shared, given.own, traced)
    blocks = SHARED // BLOCK + traced * -(-given.own // BLOCK)
    nbytes = tracemalloc.get_traced_memory()[0]
    tree_nbytes = bytes_of_tree(contexts)
    tracemalloc.stop()
    grow(contexts, rng, shared, given.own, given.contexts - traced)
    whole = ids(rng, given.prompt)
    contexts.add(whole)
    talk = ids(rng, given.prompt)
    for turn in range(1, TURNS + 1):
        contexts.add(talk[: turn * given.prompt // TURNS])
    prompts = {
        "leaves at the shared tokens": np.concatenate([shared, ids(rng, given.prompt - SHARED)]),
        "one context holds it": whole,
        f"a conversation of {TURNS} turns": talk,
        "nothing is stored": ids(rng, given.prompt),
    }
    seconds = measure({name: lambda tokens=tokens: match(contexts, tokens) for name, tokens in prompts.items()}, rounds=15)
    for name, tokens in prompts.items():
        asked = {"contexts": given.contexts, "prompt": given.prompt, "what": name}
        report("match", **asked, matched=match(contexts, tokens), ms=1e3 * seconds[name])
    report(
        "match",
        **machine(),
        contexts=given.contexts,
        own_tokens=given.own,
        bytes_a_block=nbytes / blocks,
        ids_and_tree_bytes_a_block=tree_nbytes / blocks,
    )
    contexts.close()


def grow(contexts: Contexts, rng: np.random.Generator, shared: Tokens, own: int, count: int) -> None:
    """Add contexts that leave the shared tokens somewhere, or go on behind them, with `own` tokens of their own."""
    for number in range(count):
        begin = SHARED if number % 2 else int(rng.integers(SHARED // 2, SHARED))
        contexts.add(np.concatenate([shared[:begin], ids(rng, own)]))


def match(contexts: Contexts, tokens: Tokens) -> int:
    views = contexts.catalog.match(SPEC, tokens)
    release_views(views)
    return visible_tokens(views)


def bytes_of_tree(contexts: Contexts) -> int:
    """What the token ids and a second prefix tree over the same contexts take."""
    before = tracemalloc.get_traced_memory()[0]
    tree = PrefixTree()
    stored: list[tuple[str, Views]] = [(context.name, context.views) for context in contexts.catalog.contexts()]
    held = tracemalloc.get_traced_memory()[0]
    for name, views in stored:
        tree.add(name, views)
    after = tracemalloc.get_traced_memory()[0]
    assert held >= before
    return after - held + sum(segment.ids.nbytes for segment in {view.segment for _, views in stored for view in views})


def ids(rng: np.random.Generator, n: int) -> Tokens:
    return rng.integers(0, VOCABULARY, n).astype(np.int32)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--contexts", type=int, default=100_000)
    parser.add_argument("--prompt", type=int, default=1 << 17, help="tokens of a prompt")
    parser.add_argument("--own", type=int, default=1024, help="tokens of each context that no other has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
