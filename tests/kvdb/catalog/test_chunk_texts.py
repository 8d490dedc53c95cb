"""Chunks are found by exactly their text, whatever came, went and was looked for before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdb.catalog.contexts.chunk_texts import ChunkTexts
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView

texts = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)
keys = st.tuples(st.sampled_from("ab"), st.sampled_from(["", "salt"]), texts)


@given(st.lists(st.tuples(st.sampled_from(["add", "again", "remove", "find"]), keys, st.integers(0, 9)), max_size=40))
def test_a_dictionary_of_texts_finds_the_same(steps):
    chunks, model = ChunkTexts(), {}  # by spec, salt and text: the views, as often as they were added
    for what, key, number in steps:
        spec, salt, text = key
        stored = model.setdefault(key, [])
        if what == "add" or (what == "again" and not stored):
            stored.append((SegmentView(Segment(PackedIds(np.array(text, np.int32)), []), len(text)),))
            chunks.add(spec, salt, stored[-1])
        elif what == "again":
            stored.append(stored[number % len(stored)])
            chunks.add(spec, salt, stored[-1])
        elif what == "remove" and stored:
            chunks.remove(spec, salt, stored.pop(number % len(stored)))
        found = chunks.find(spec, salt, np.array(text, np.int32)) if what == "find" else None
        assert found is None or (found in stored if stored else found == ())
