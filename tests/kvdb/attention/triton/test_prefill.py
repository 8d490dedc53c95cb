"""Paged prefill against dense causal attention in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.prefill import prefill
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

SCALE = 0.25


def pieces_of(pages, lengths, seed=0, **kwargs):
    """Pieces of random slots; kwargs: of the first."""
    rng, block = np.random.default_rng(seed), pages.layout.block_size
    free = rng.permutation(len(pages.slab)).astype(np.int32)
    pieces = []
    for i, n in enumerate(lengths):
        slots, free = np.split(free, [-(-n // block)])
        fill(pages, slots, n, seed=seed + i)
        pieces.append(Piece(slots, n, **(kwargs if i == 0 else {})))
    return pieces


def queries(heads, n, head_dim, dtype=torch.float32):
    return torch.randn((heads, n, head_dim), generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


def answer(q, pages, batch, splits=None):
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=DEVICE)
    prefill(q, pages, batch, SCALE, out, lse, splits)
    return out, lse


def expected(q, pages, pieces, angles=None, interleaved=False):
    states, n = [], q.shape[1]
    for i, piece in enumerate(pieces):
        visible = shown(piece, pages.layout.block_size).expand(n, -1)
        if i == len(pieces) - 1:
            visible = visible & (torch.arange(piece.tokens)[None] <= piece.tokens - n + torch.arange(n)[:, None])
        states.append(
            attention(turned(q, piece, angles, interleaved), *read(pages, piece.slots, piece.tokens), SCALE, visible.to(DEVICE))
        )
    return merge(states)


def check(got, wanted, tolerance=1e-5):
    (out, lse), (right, right_lse, _) = got, wanted
    some = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, some)
    assert not out[~some].any()
    assert error(out[some], right[some]) < tolerance
    assert apart(lse[some], right_lse[some]) < tolerance


@pytest.mark.parametrize("form", SLOT_FORMATS)
@pytest.mark.parametrize("splits", [1, 3])
def test_new_tokens_see_the_context_and_those_before_them(form, splits):
    pages = make_pages(SlotLayout(form, 2, 24, 16), 20, DEVICE)
    pieces = pieces_of(pages, [70, 33, 45])
    q = queries(6, 30, 24)
    check(answer(q, pages, Batch([pieces], 3, DEVICE, layout=pages.layout), splits), expected(q, pages, pieces), tolerance(form))


@pytest.mark.parametrize("n", [1, 5, 15, 16, 17, 33, 64])
def test_any_number_of_them_is_answered(n):
    pages = make_pages(SlotLayout("float32", 1, 16, 16), 12, DEVICE)
    pieces = pieces_of(pages, [40, 64])
    q = queries(4, n, 16)
    check(answer(q, pages, Batch([pieces], 4, DEVICE, layout=pages.layout)), expected(q, pages, pieces))


@pytest.mark.parametrize("splits", [1, 2])
def test_hundreds_of_new_tokens_take_several_tiles(splits):
    pages = make_pages(SlotLayout("bfloat16", 2, 16, 64), 10, DEVICE)
    pieces = pieces_of(pages, [90, 300])
    q = queries(2, 290, 16, torch.bfloat16)
    out, lse = answer(q, pages, Batch([pieces], 1, DEVICE, layout=pages.layout), splits)
    right, right_lse, _ = expected(q, pages, pieces)
    assert out.dtype == torch.bfloat16
    assert error(out, right) < TOLERANCE["bfloat16"]
    assert error(lse, right_lse) < tolerance("bfloat16")


@pytest.mark.parametrize("interleaved", [False, True])
def test_moved_pieces_turn_the_queries_and_hidden_tokens_are_passed_over(interleaved):
    angles = [torch.randn((2, 6), generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2)]
    pages = make_pages(SlotLayout("float32", 2, 16, 10), 20, DEVICE)
    words = np.random.default_rng(3).integers(0, 1 << 63, (8, 1), np.uint64)
    pieces = pieces_of(pages, [77, 40], rotation=1, hidden=words)
    q = queries(4, 20, 16)
    batch = Batch([pieces], 2, DEVICE, tuple(part.cpu().numpy() for part in angles), layout=pages.layout, interleaved=interleaved)
    check(answer(q, pages, batch, 2), expected(q, pages, pieces, angles, interleaved))


def test_queries_that_see_nothing_answer_zero():
    pages = make_pages(SlotLayout("float32", 1, 16, 8), 2, DEVICE)
    all_hidden = np.full((1, 1), 2**64 - 1, np.uint64)
    pieces = pieces_of(pages, [6], hidden=all_hidden)
    out, lse = answer(queries(1, 6, 16), pages, Batch([pieces], 1, DEVICE, layout=pages.layout), 2)
    assert not out.any()
    assert (lse == -torch.inf).all()


@given(
    block=st.integers(1, 40),
    group=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 50), max_size=3),
    last=st.integers(1, 40),
    splits=st.integers(1, 4),
    data=st.data(),
)
def test_whatever_the_pieces_are_the_answer_is_dense_attention(block, group, lengths, last, splits, data):
    pages = make_pages(SlotLayout("float32", 1, 8, block), 250, DEVICE)
    pieces = pieces_of(pages, [*lengths, last])
    q = queries(group, data.draw(st.integers(1, last)), 8)
    check(answer(q, pages, Batch([pieces], group, DEVICE, layout=pages.layout), splits), expected(q, pages, pieces))


def test_what_does_not_fit_is_refused_before_a_launch():
    layout = SlotLayout("float32", 2, 16, 8)
    pages, piece = make_pages(layout, 2, DEVICE), Piece(np.zeros(1, np.int32), 5)
    batch, q, lse = Batch([[piece]], 2, DEVICE, layout=layout), queries(4, 3, 16), torch.zeros((4, 3), device=DEVICE)
    with pytest.raises(ValueError, match="prefill answers one"):
        prefill(q, pages, Batch([[piece], [piece]], 2, DEVICE, layout=layout), 1.0, q.clone(), lse)
    with pytest.raises(ValueError, match="q is"):
        prefill(q[:3], pages, batch, 1.0, q[:3].clone(), lse)
    with pytest.raises(ValueError, match="out is"):
        prefill(q, pages, batch, 1.0, q[:, :2], lse)
    with pytest.raises(ValueError, match=r"lse is torch\.float64"):
        prefill(q, pages, batch, 1.0, q.clone(), lse.double())
    with pytest.raises(ValueError, match="scale"):
        prefill(q, pages, batch, -1.0, q.clone(), lse)
    with pytest.raises(ValueError, match="the batch was made for"):
        prefill(q, make_pages(SlotLayout("float32", 2, 16, 4), 1, DEVICE), batch, 1.0, q.clone(), lse)
