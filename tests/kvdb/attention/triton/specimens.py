"""Calls whose kernels `compiled` compiles for real cards, in the sizes of a common model. A new kernel is one more entry.

Every kernel is compiled once for each card. The variants of the attention kernels, whose registers and copies differ, are divided
among the cards.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvdb.attention.signs import SIGNS
from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.blocks import copy, load, store
from kvdb.attention.triton.coarse import CoarseWorkspace, bounds, coarse_top
from kvdb.attention.triton.decode import decode
from kvdb.attention.triton.dipr import dipr
from kvdb.attention.triton.finish import STATE_INTS, SUMS, NoteRows, Rereading, States, finish, judge
from kvdb.attention.triton.flat import encode
from kvdb.attention.triton.pages import Runs
from kvdb.attention.triton.prefill import prefill
from kvdb.attention.triton.rope import rotate
from kvdb.attention.triton.workspace import DiprWorkspace
from kvdb.storage.slot import SlotLayout
from tests.kvdb.attention.triton.reference import CPU, make_pages

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 4, 128, 64


@dataclass(frozen=True)
class Specimen:
    """launch: calls public functions with tensors on the CPU, and launches nothing: their kernels are compiled instead. cards:
    the compute capabilities that it is compiled for. copies: bytes of the widest and the narrowest asynchronous copy; None for
    kernels that need none."""

    launch: Callable[[], None]
    cards: tuple[int, ...] = (80, 90)
    copies: tuple[int, int] | None = None


def _batch(form: str, sequences: int, block: int = BLOCK, placed: bool = False):
    """sequences: that share one piece. placed: it is moved, and tokens of it are hidden."""
    layout = SlotLayout(form, KV_HEADS, HEAD_DIM, block)
    hidden = np.zeros((2, -(-block // 64)), np.uint64) if placed else None
    piece = Piece(np.arange(2, dtype=np.int32), 2 * block, 0 if placed else -1, hidden, "shared")
    angle = np.zeros((1, HEAD_DIM // 2), np.float32)
    batch = Batch([[piece]] * sequences, GROUP, CPU, (angle, angle) if placed else None, layout=layout)
    return make_pages(layout, 2, CPU), batch


def _decode(form: str, sequences: int, block: int = BLOCK, placed: bool = False) -> Callable[[], None]:
    def call() -> None:
        pages, batch = _batch(form, sequences, block, placed)
        q = torch.zeros((sequences, KV_HEADS * GROUP, HEAD_DIM), dtype=torch.bfloat16)
        lse = torch.zeros(q.shape[:2])
        decode(q, pages, batch, 0.1, torch.empty_like(q), lse, lse.clone())

    return call


def _prefill(form: str, n: int, splits: int, block: int = BLOCK, placed: bool = False) -> Callable[[], None]:
    def call() -> None:
        pages, batch = _batch(form, 1, block, placed)
        q = torch.zeros((KV_HEADS * GROUP, n, HEAD_DIM), dtype=torch.bfloat16)
        prefill(q, pages, batch, 0.1, torch.empty_like(q), torch.zeros(q.shape[:2]), splits)

    return call


def _rope() -> None:
    x, angles = torch.zeros((4, HEAD_DIM), dtype=torch.bfloat16), torch.zeros((4, HEAD_DIM // 2))
    rotate(x, angles, angles, False, x)


def _runs(form: str, block: int):
    layout, zeros = SlotLayout(form, KV_HEADS, HEAD_DIM, block), torch.zeros(2, dtype=torch.int32)
    return make_pages(layout, 2, CPU), Runs(zeros, zeros.clone(), zeros.clone(), 2 * block)


def _dipr(form: str, block: int = BLOCK) -> Callable[[], None]:
    def call() -> None:
        pages, runs = _runs(form, block)
        q, lse = torch.zeros((2, KV_HEADS * GROUP, HEAD_DIM), dtype=torch.bfloat16), torch.zeros((2, KV_HEADS * GROUP))
        workspace = DiprWorkspace.of(pages.layout, 2, KV_HEADS * GROUP, 1 << 17, CPU)
        dipr(q, pages, runs, 0.1, 50.0, lse, workspace, torch.empty_like(q), lse.clone(), lse.clone())

    return call


def _coarse(form: str, block: int = BLOCK) -> Callable[[], None]:
    def call() -> None:
        pages, runs = _runs(form, block)
        q, lse = torch.zeros((2, KV_HEADS * GROUP, HEAD_DIM), dtype=torch.bfloat16), torch.zeros((2, KV_HEADS * GROUP))
        workspace = CoarseWorkspace.of(pages.layout, 2, KV_HEADS * GROUP, 1 << 17, 64, CPU)
        coarse_top(q, pages, runs, 0.1, 64, workspace, torch.empty_like(q), lse)

    return call


def _blocks(form: str, block: int = BLOCK) -> Callable[[], None]:
    def call() -> None:
        pages, runs = _runs(form, block)
        k = torch.zeros((KV_HEADS, block, HEAD_DIM), dtype=torch.bfloat16)
        store(pages, runs.table, 0, k, k)
        load(pages, runs.table, 0, block)
        copy(pages, runs.table, runs.begin)
        encode(pages, runs.table, runs.tokens)
        bounds(pages, runs.table, runs.tokens)

    return call


def _finish() -> None:
    q, kv = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, KV_HEADS * GROUP, HEAD_DIM), (2, 2, KV_HEADS, HEAD_DIM)))
    ints, floats = torch.zeros(64, dtype=torch.int32), torch.zeros(1 << 16)
    states = States(floats, ints[:20].clone().view(4, STATE_INTS), ints[:3].clone())
    numbers = [ints[:n].clone() for n in (2, 1, 2)]
    ranges = torch.zeros((2, 2, SIGNS, KV_HEADS * GROUP))
    anew = Rereading(states, torch.zeros((2, KV_HEADS)), ranges, torch.zeros(2), *numbers)
    judge(states, anew, q)
    notes = NoteRows(ints[:2].clone(), ints[:2].clone(), torch.zeros((2, SUMS)))
    finish(states, q, kv, torch.empty_like(q), ints[:2].clone(), notes, anew)


SPECIMENS = {
    "decode bfloat16": Specimen(_decode("bfloat16", 1), (90,), (16, 16)),
    "decode bfloat16, moved, hidden, odd blocks": Specimen(_decode("bfloat16", 1, 48, placed=True), (80,), (16, 8)),
    "decode bfloat16, 16 share": Specimen(_decode("bfloat16", 16), (80,), (16, 16)),
    "decode int8, 32 share": Specimen(_decode("int8", 32), (90,), (16, 4)),
    "prefill bfloat16": Specimen(_prefill("bfloat16", 100, 1), (80,), (16, 16)),
    "prefill bfloat16, split, moved, hidden": Specimen(_prefill("bfloat16", 4, 2, placed=True), (90,), (16, 8)),
    "rope bfloat16": Specimen(_rope),
    "finish bfloat16": Specimen(_finish),
    "dipr bfloat16": Specimen(_dipr("bfloat16"), (90,)),
    "dipr int8, odd blocks": Specimen(_dipr("int8", 48), (80,)),
    "coarse bfloat16": Specimen(_coarse("bfloat16")),
    "blocks and index pages float8": Specimen(_blocks("float8"), (80,)),
    "blocks and index pages bfloat16, odd blocks": Specimen(_blocks("bfloat16", 48), (90,)),
}
