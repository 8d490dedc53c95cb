"""Stop sequences in pieces; the oracle is the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.rag_server.completion import StopText

TEXT = st.text("ab", max_size=6)


@given(pieces=st.lists(TEXT, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_the_text_is_cut_before_the_first_sequence_that_is_whole(pieces, stops):
    cut = StopText(stops)
    told = ""
    whole = ""
    for piece in pieces:
        whole += piece
        told += cut.add(piece)
        if cut.found:
            break
    told += cut.rest()
    assert cut.found == any(stop in whole for stop in stops)
    assert told == whole[: min((whole.index(stop) for stop in stops if stop in whole), default=len(whole))]
