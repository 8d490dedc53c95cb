"""How long does it take to find a prefix of a hybrid model and hand back what its layers keep, beside a copy of the same bytes?

    python -m benchmarks.hand_back [--tokens 8192]

The layers are those of Qwen3.5's shape: of every four, three keep a convolution's and a recurrent state (gated DeltaNet, 32 heads
of 128 x 128 in float32), and one keeps keys and values (2 KV heads of 256, bfloat16). A context is stored, then found by its
tokens, and what all layers keep is written into tensors that are there already, as an engine fills its own cache. The yardstick
is torch's copy of the same bytes into the same tensors. One JSON line per measurement; the candidates ran interleaved, figures
are medians.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import kvdb
from benchmarks.harness import argument_parser, machine, measure, report
from kvdb.config import Config, StorageConfig

LAYERS, EVERY = 48, 4
KV_HEADS, HEAD_DIM, HEADS, WIDTH = 2, 256, 32, 128
CHANNELS, TAPS = 2 * 16 * WIDTH + HEADS * WIDTH, 4
STATE = kvdb.State({"conv": ((CHANNELS, TAPS), "bfloat16"), "recurrent": ((HEADS, WIDTH, WIDTH), "float32")})
ATTENTION = kvdb.Attention(16, KV_HEADS, HEAD_DIM, rope=kvdb.Rope(1e7, 64))
SPEC = kvdb.ModelSpec("qwen3.5 in shape", layers=LAYERS // EVERY * [*(EVERY - 1) * [STATE], ATTENTION], dtype="bfloat16")


class Kept:
    """What the layers of a prefix keep: tensors by layer, of random numbers or empty."""

    def __init__(self, tokens: int, *, seed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype) if seed is None else torch.randn(shape, generator=generator).to(dtype)

        kv, conv, recurrent = (KV_HEADS, tokens, HEAD_DIM), (CHANNELS, TAPS), (HEADS, WIDTH, WIDTH)
        self.kv = {layer: (make(kv, torch.bfloat16), make(kv, torch.bfloat16)) for layer in SPEC.attending}
        self.states = {
            layer: {"conv": make(conv, torch.bfloat16), "recurrent": make(recurrent, torch.float32)}
            for layer in range(LAYERS)
            if layer not in self.kv
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*(one for pair in self.kv.values() for one in pair), *(t for one in self.states.values() for t in one.values())]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_from(self, other: Kept) -> None:
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


def hand_back(db: kvdb.Client, ids: np.ndarray, into: Kept) -> None:
    """Find the prefix, and write what its layers keep into the tensors."""
    with db.create_session(SPEC, ids) as session:
        assert session.reused == len(ids)
        session.read(list(into.kv), 0, len(ids), out=list(into.kv.values()))
        for layer, tensors in into.states.items():
            for name, array in session.state(layer).items():
                np.copyto(tensors[name].view(torch.uint8).numpy(), array.view(np.uint8))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    ids, given, into, beside = np.arange(tokens, dtype=np.int32), Kept(tokens, seed=1), Kept(tokens), Kept(tokens)
    report("hand_back.machine", **machine(), threads=torch.get_num_threads())
    with kvdb.connect(config=Config(storage=StorageConfig(arena_bytes=1 << 28))) as db:
        kv = [given.kv.get(layer) for layer in range(LAYERS)]
        db.import_context(SPEC, ids, kv, name="prefix", states=given.states)
        seconds = measure({"kvdb": lambda: hand_back(db, ids, into), "copy": lambda: beside.copy_from(given)}, rounds=21)
    assert all(torch.equal(a, b) for a, b in zip(into.tensors, given.tensors, strict=True))
    ratio = seconds["kvdb"] / seconds["copy"]
    figures = {name: round(1e3 * took, 2) for name, took in seconds.items()}
    report("hand_back", tokens=tokens, nbytes=given.nbytes, ms=figures, ratio=round(ratio, 3))
    sys.stderr.write(
        f"\n{tokens:,} tokens, {given.nbytes / 2**20:,.0f} MiB: found and handed back in {figures['kvdb']} ms, "
        f"torch copies the same in {figures['copy']} ms, {ratio:.2f} times\n"
    )


if __name__ == "__main__":
    main()
