"""Paged flash-decoding against dense attention in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention.triton.batch import SPLIT_TOKENS_MAX, Batch, PartialBuffer, Piece, even_splits
from kvdb.attention.triton.decode import decode
from kvdb.storage.slot import SLOT_FORMATS, SlotLayout
from tests.kvdb.attention.triton.reference import (
    DEVICE,
    TOLERANCE,
    apart,
    attention,
    error,
    fill,
    make_pages,
    merge,
    read,
    shown,
    tolerance,
    turned,
)

SCALE = 0.3


class Deck:
    """Slots dealt at random, so that no piece has its blocks in order."""

    def __init__(self, layout, slots, seed=0):
        self.pages, self._rng = make_pages(layout, slots, DEVICE), np.random.default_rng(seed)
        self._free = list(self._rng.permutation(slots))

    def piece(self, tokens, room=0, **kwargs):
        blocks = -(-tokens // self.pages.layout.block_size)
        slots = np.array([self._free.pop() for _ in range(blocks)], np.int32)
        fill(self.pages, slots, tokens, seed=len(self._free))
        return Piece(slots, tokens, **kwargs)


def answer(q, pages, batch):
    """What decode writes over NaN, and that it leaves the counters as it found them."""
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=DEVICE)
    top = lse.clone()
    decode(q, pages, batch, SCALE, out, lse, top)
    assert not batch.counters.any()
    return out, lse, top


def expected(q, pages, pieces, angles=None, interleaved=False, tokens=None):
    """The states of the pieces merged, for one sequence's q `[q_heads, head_dim]`."""
    states = [attention(q[:, None], *(torch.zeros((1, 0, q.shape[1]), device=DEVICE) for _ in range(2)), SCALE)]
    for piece in pieces:
        rows = turned(q, piece, angles, interleaved)[:, None]
        visible = shown(piece, pages.layout.block_size).to(DEVICE)
        states.append(attention(rows, *read(pages, piece.slots, piece.tokens), SCALE, visible))
    return [part[:, 0] for part in merge(states)]


def check(got, wanted, tolerance):
    """Rows of one sequence."""
    (out, lse, top), (right, right_lse, right_top) = got, wanted
    some = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, some)
    assert torch.equal(top > -torch.inf, some)
    assert not out[~some].any()
    if some.any():
        assert error(out[some], right[some]) < tolerance
        assert apart(lse[some], right_lse[some]) < tolerance
        assert apart(top[some], right_top[some]) < tolerance


def queries(sequences, heads, head_dim, dtype=torch.float32):
    return torch.randn((sequences, heads, head_dim), generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


@pytest.mark.parametrize("form", SLOT_FORMATS)
@pytest.mark.parametrize(("block", "head_dim"), [(64, 64), (5, 40), (48, 16), (1, 8)])
def test_pages_of_every_format_and_block_size_answer_exactly(form, block, head_dim):
    deck = Deck(SlotLayout(form, 2, head_dim, block), 60)
    pieces = [deck.piece(min(70, 40 * block)), deck.piece(min(9, block))]
    q = queries(1, 6, head_dim)
    got = answer(q, deck.pages, Batch([pieces], 3, DEVICE, layout=deck.pages.layout, split_tokens=32))
    check([part[0] for part in got], expected(q[0], deck.pages, pieces), tolerance(form))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_and_outputs_have_the_models_dtype(dtype):
    deck = Deck(SlotLayout("bfloat16", 1, 256, 16), 8)
    pieces = [deck.piece(50)]
    q = queries(1, 1, 256, dtype) / 4
    out, lse, _ = answer(q, deck.pages, Batch([pieces], 1, DEVICE, layout=deck.pages.layout))
    right, right_lse, _ = expected(q[0], deck.pages, pieces)
    assert out.dtype == dtype
    assert error(out[0], right) < TOLERANCE["bfloat16"]
    assert error(lse[0], right_lse) < tolerance("bfloat16")


@pytest.mark.parametrize("edge", [0, 1, 15, 16, 17, 31, 32, 33])
def test_contexts_end_anywhere_about_the_edge_of_a_block(edge):
    deck = Deck(SlotLayout("float32", 1, 16, 16), 8)
    pieces = [deck.piece(edge)]
    q = queries(1, 2, 16)
    got = answer(q, deck.pages, Batch([pieces], 2, DEVICE, layout=deck.pages.layout, split_tokens=16))
    check([part[0] for part in got], expected(q[0], deck.pages, pieces), 1e-5)


def test_a_ragged_batch_has_sequences_without_tokens_and_without_pieces():
    deck = Deck(SlotLayout("bfloat16", 2, 32, 16), 64)
    sequences = [[deck.piece(300)], [], [deck.piece(0)], [deck.piece(1), deck.piece(17), deck.piece(40)]]
    q = queries(4, 4, 32)
    got = answer(q, deck.pages, Batch(sequences, 2, DEVICE, layout=deck.pages.layout, split_tokens=64))
    for i, pieces in enumerate(sequences):
        check([part[i] for part in got], expected(q[i], deck.pages, pieces), tolerance("bfloat16"))


@pytest.mark.parametrize(("sharing", "launches"), [(2, {16}), (5, {16, 64}), (40, {16, 64, 128})])
def test_what_sequences_share_is_read_once_in_tiles_of_their_rows(sharing, launches):
    deck = Deck(SlotLayout("bfloat16", 2, 16, 16), 120)
    shared = deck.piece(150, key="shared")
    sequences = [[shared, deck.piece(3 + i)] for i in range(sharing)] + [[deck.piece(60)]]
    batch = Batch(sequences, 4, DEVICE, layout=deck.pages.layout, split_tokens=64)
    read_by = [int(p) for p in batch.programs[:, 0]]
    shared_piece = sharing + 1
    assert read_by.count(shared_piece) == 3 * -(-sharing // 32), "of 150 tokens in splits of 64, for each 32 sequences"
    assert {launch.rows for launch in batch.launches} == launches
    q = queries(sharing + 1, 8, 16)
    got = answer(q, deck.pages, batch)
    for i, pieces in enumerate(sequences):
        check([part[i] for part in got], expected(q[i], deck.pages, pieces), tolerance("bfloat16"))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("block", [32, 100])
def test_moved_pieces_turn_the_query_back_and_hidden_tokens_are_passed_over(interleaved, block):
    angles = [torch.randn((2, 6), generator=torch.Generator().manual_seed(seed)).numpy() for seed in (1, 2)]
    deck, rng = Deck(SlotLayout("float32", 2, 16, block), 30), np.random.default_rng(3)
    plain, moved = deck.piece(150), deck.piece(90, rotation=1)
    words = rng.integers(0, 1 << 63, (len(plain.slots), -(-block // 64)), np.uint64)
    some = Piece(plain.slots, plain.tokens, 0, words)
    gone = deck.piece(40, hidden=np.full((-(-40 // block), -(-block // 64)), 2**64 - 1, np.uint64))
    sequences = [[some, moved], [gone, plain], [gone]]
    q = queries(3, 4, 16)
    batch = Batch(sequences, 2, DEVICE, tuple(angles), layout=deck.pages.layout, interleaved=interleaved, split_tokens=64)
    got = answer(q, deck.pages, batch)
    angles = [torch.from_numpy(part).to(DEVICE) for part in angles]
    for i, pieces in enumerate(sequences):
        check([part[i] for part in got], expected(q[i], deck.pages, pieces, angles, interleaved), 1e-5)


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("tokens", [[1 << 17], [1 << 17] * 32, [1 << 20, 5, 0, 300], [40] * 500, [100_000, 90_000, 80_000]])
def test_programs_fill_the_card_once_unless_items_are_long_or_many(rows, tokens):
    each, room = even_splits(8, 132)(rows, tokens), 132 * (3 if rows == 16 else 1)
    programs = 8 * sum(max(1, -(-n // each)) for n in tokens)
    assert programs <= max(room, 8 * len(tokens)) or each >= SPLIT_TOKENS_MAX
    if sum(tokens) * 8 > 4096 * room and len(tokens) == 1:
        assert programs > 0.9 * room


def test_tails_grow_in_place_and_a_batch_answers_again_and_again():
    deck = Deck(SlotLayout("float32", 1, 16, 8), 12)
    long = deck.piece(40)
    tails = [Piece(long.slots[:1], 5), deck.piece(3)]
    batch = Batch([[deck.piece(20, key="a"), tails[0]], [tails[1]]], 2, DEVICE, layout=deck.pages.layout, room=4)
    q = queries(2, 2, 16)
    answer(q, deck.pages, batch)
    batch.set_slots(0, long.slots)
    batch.set_tails(np.array([37, 3]))
    got = answer(q, deck.pages, batch)
    check([part[1] for part in got], expected(q[1], deck.pages, [tails[1]]), 1e-5)
    alone = answer(q[:1], deck.pages, Batch([[Piece(long.slots, 37)]], 2, DEVICE, layout=deck.pages.layout))
    shared = deck.pages, batch.table[batch.pieces[2, 0] :][:3]
    state = merge([[p[0].double() for p in alone], [p[:, 0] for p in attention(q[0][:, None], *read(*shared, 20), SCALE)]])
    check([part[0] for part in got], state, 1e-5)
    batch.tails.sub_(1)
    assert batch.lengths.tolist() == [36, 2, 20]
    batch.set_tails(np.array([40, 0]))
    assert batch.lengths.tolist() == [40, 0, 20]
    with pytest.raises(ValueError, match=r"\[3, 9\] tokens in pieces whose slots hold \[40, 8\]"):
        batch.set_tails(np.array([3, 9]))
    with pytest.raises(ValueError, match="6 slots for a piece that has room for 5"):
        batch.set_slots(0, np.zeros(6, np.int32))


def test_a_shared_last_piece_cannot_grow():
    layout = SlotLayout("float32", 1, 16, 8)
    piece = Piece(np.zeros(1, np.int32), 5, key="shared")
    batch = Batch([[piece], [piece]], 1, DEVICE, layout=layout)
    for change in (lambda: batch.set_tails(np.array([1, 1])), lambda: batch.set_slots(1, piece.slots), lambda: batch.tails):
        with pytest.raises(ValueError, match="shared"):
            change()


def test_batches_of_one_workspace_answer_one_after_the_other():
    deck = Deck(SlotLayout("float32", 1, 16, 8), 40)
    room, q = PartialBuffer(DEVICE), queries(1, 2, 16)
    lots = [[deck.piece(n)] for n in (50, 120, 9)]
    batches = [Batch([pieces], 2, DEVICE, layout=deck.pages.layout, workspace=room, split_tokens=16) for pieces in lots]
    for pieces, batch in zip(lots, batches, strict=True):
        check([part[0] for part in answer(q, deck.pages, batch)], expected(q[0], deck.pages, pieces), 1e-5)


@given(
    block=st.integers(1, 70),
    head_dim=st.integers(1, 4).map(lambda n: 8 * n),
    group=st.integers(1, 5),
    lengths=st.lists(st.lists(st.integers(0, 90), max_size=3), min_size=1, max_size=3),
    split_tokens=st.integers(1, 100),
    data=st.data(),
)
def test_whatever_lies_where_the_answer_is_that_of_dense_attention(block, head_dim, group, lengths, split_tokens, data):
    form = data.draw(st.sampled_from(["float32", "int8"]))
    deck = Deck(SlotLayout(form, 1, head_dim, block), 900)
    common = deck.piece(data.draw(st.integers(0, 60)), key="common")
    shares = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    sequences = [[common] * own + [deck.piece(n) for n in some] for own, some in zip(shares, lengths, strict=True)]
    q = queries(len(sequences), group, head_dim)
    got = answer(q, deck.pages, Batch(sequences, group, DEVICE, layout=deck.pages.layout, split_tokens=split_tokens))
    for i, pieces in enumerate(sequences):
        check([part[i] for part in got], expected(q[i], deck.pages, pieces), tolerance(form))


def test_what_does_not_fit_is_refused_before_a_launch():
    layout = SlotLayout("float32", 2, 16, 8)
    pages, piece = make_pages(layout, 2, DEVICE), Piece(np.zeros(1, np.int32), 5)
    batch, q, lse = Batch([[piece]], 2, DEVICE, layout=layout), queries(1, 4, 16), torch.zeros((1, 4), device=DEVICE)
    with pytest.raises(ValueError, match="q is"):
        decode(q[:, :2], pages, batch, 1.0, q.clone(), lse)
    with pytest.raises(ValueError, match="out is"):
        decode(q, pages, batch, 1.0, q.new_zeros((4, 1, 16)), lse)
    with pytest.raises(ValueError, match=r"lse is torch\.float64"):
        decode(q, pages, batch, 1.0, q.clone(), lse.double())
    with pytest.raises(ValueError, match="scale"):
        decode(q, pages, batch, 0.0, q.clone(), lse)
    with pytest.raises(ValueError, match="the batch was made for"):
        decode(q, make_pages(SlotLayout("float32", 2, 16, 4), 1, DEVICE), batch, 1.0, q.clone(), lse)
    with pytest.raises(ValueError, match="9 tokens in 1 blocks of 8"):
        Batch([[Piece(piece.slots, 9)]], 2, DEVICE, layout=layout)
    with pytest.raises(ValueError, match="rotation 0"):
        Batch([[Piece(piece.slots, 5, 0)]], 2, DEVICE, layout=layout)
    with pytest.raises(ValueError, match="hidden is"):
        Batch([[Piece(piece.slots, 5, -1, np.zeros((2, 1), np.uint64))]], 2, DEVICE, layout=layout)
    with pytest.raises(ValueError, match="query heads of a KV head"):
        Batch([[piece]], 129, DEVICE, layout=layout)
