"""Calls whose kernels `compiled` compiles for real cards, in the sizes of a common model. Another kernel is one entry more."""

import numpy as np
import torch

from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.decode import decode
from kvdb.storage.slot import SlotLayout
from tests.triton.reference import CPU, make_pages

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 4, 128, 64


def _decode(form: str, sequences: int, block: int = BLOCK, placed: bool = False):
    """sequences: that share one piece. placed: it is moved, and tokens of it are hidden."""

    def call() -> None:
        layout = SlotLayout(form, KV_HEADS, HEAD_DIM, block)
        pages, q = make_pages(layout, 2), torch.zeros((sequences, KV_HEADS * GROUP, HEAD_DIM), dtype=torch.bfloat16)
        hidden = np.zeros((2, -(-block // 64)), np.uint64) if placed else None
        piece = Piece(np.arange(2, dtype=np.int32), 2 * block, 0 if placed else -1, hidden, "shared")
        angle = np.zeros((1, HEAD_DIM // 2), np.float32)
        batch = Batch([[piece]] * sequences, GROUP, CPU, (angle, angle) if placed else None, layout=layout)
        lse = torch.zeros(q.shape[:2])
        decode(q, pages, batch, 0.1, torch.empty_like(q), lse, lse.clone())

    return call


SPECIMENS = {
    "decode bfloat16": _decode("bfloat16", 1),
    "decode bfloat16, moved, hidden, odd blocks": _decode("bfloat16", 1, 48, placed=True),
    "decode bfloat16, 16 share": _decode("bfloat16", 16),
    "decode bfloat16, 32 share": _decode("bfloat16", 32),
    "decode float8": _decode("float8", 1),
    "decode int8, 32 share": _decode("int8", 32),
    "decode float32": _decode("float32", 1),
}
