"""The prefix tree finds the longest stored prefix, whatever was stored and dropped before."""

import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdb.catalog.contexts.prefix_tree import PrefixTree, common_prefix, concatenate
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView, visible_tokens

# Few distinct tokens, so that sequences share prefixes and part in the middle of segments.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.array(ids, np.int32))


def stored(tree, tokens, name=""):
    """Store tokens as the database does: behind their longest stored prefix, with a segment of their own for the rest."""
    views = tree.match(tokens)
    rest = tokens[visible_tokens(views) :]
    if len(rest):
        views = (*views, SegmentView(Segment(PackedIds(rest), []), len(rest)))
    tree.add(name, views)
    return views


@given(st.lists(sequences, max_size=12), st.lists(st.booleans(), max_size=12), sequences)
def test_the_match_is_the_longest_prefix_of_what_is_stored(contexts, dropped, prompt):
    tree = PrefixTree()
    paths = [(tokens, stored(tree, tokens, str(i))) for i, tokens in enumerate(contexts)]
    for i, drop in list(enumerate(dropped))[: len(paths)]:
        if drop:
            tree.remove(str(i), paths[i][1])
            paths[i] = None
    alive = [path for path in paths if path is not None]
    views = tree.match(prompt)
    longest = max((common_prefix(tokens, prompt) for tokens, _ in alive), default=0)
    assert visible_tokens(views) == longest
    assert (concatenate(views) == prompt[:longest]).all()


@given(st.lists(sequences, max_size=12))
def test_nothing_is_left_when_every_context_is_dropped(contexts):
    """Neither is anything found, nor does the tree keep a segment."""
    tree = PrefixTree()
    kept = []
    for i, views in enumerate([stored(tree, tokens, str(i)) for i, tokens in enumerate(contexts)]):
        kept += [weakref.ref(view.segment) for view in views]
        tree.remove(str(i), views)
        del views
    assert all(not tree.match(tokens) for tokens in contexts)
    assert not any(segment() for segment in kept)


@given(st.lists(sequences, max_size=12))
def test_a_token_is_stored_once(contexts):
    """Segments hold as many tokens as the trie of all contexts has nodes."""
    tree = PrefixTree()
    segments = {view.segment for i, tokens in enumerate(contexts) for view in stored(tree, tokens, str(i))}
    prefixes = {tuple(tokens[: i + 1]) for tokens in contexts for i in range(len(tokens))}
    assert sum(len(segment) for segment in segments) == len(prefixes)


def test_a_prompt_that_ends_inside_a_segment_sees_only_its_beginning():
    tree = PrefixTree()
    stored(tree, np.arange(10, dtype=np.int32))
    (view,) = tree.match(np.array([0, 1, 2, 9], np.int32))
    assert view.visible == 3
    assert len(view.segment) == 10
