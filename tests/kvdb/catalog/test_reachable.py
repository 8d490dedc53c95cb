"""The yardstick of space is the one that a trie of single tokens gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdb.catalog.compaction.reachable import run_lengths

texts = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=10)


def runs_of_trie(contexts):
    """The lengths of the stretches of a trie of single tokens between its branches."""
    nodes = {tuple(text[: i + 1]) for text in contexts for i in range(len(text))}
    children = {node: [other for other in nodes if other[:-1] == node] for node in {*nodes, ()}}
    begins = [node for node in nodes if node[:-1] == () or len(children[node[:-1]]) > 1]
    lengths = []
    for node in begins:
        run = [node]
        while len(children[run[-1]]) == 1:
            run += children[run[-1]]
        lengths.append(len(run))
    return sorted(lengths)


@given(texts)
def test_runs_are_those_of_a_trie(contexts):
    assert sorted(run_lengths([np.array(text, np.int32) for text in contexts])) == runs_of_trie(contexts)
