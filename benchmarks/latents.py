"""How fast is attention of many query heads over one row of latents a token, beside torch and beside what memory delivers?

    python -m benchmarks.latents [--tokens 32768]

MLA, as DeepSeek V3 decodes: 128 query heads share one KV head of 576 numbers a token, of which the first 512 are the value. One
query of one layer in bfloat16. One JSON line per measurement, and a table to stderr; the candidates of a line ran interleaved,
figures are medians.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from benchmarks.attend import bits, difference, fastest_of_torch
from benchmarks.harness import argument_parser, huge_pages, machine, measure, report
from kvdb import _native

Q_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE = 128, 576, 512, 64
SCALE = 192**-0.5
"""Of the heads before their products with the latents' matrices: 128 numbers, and 64 that tell positions."""


class Latents:
    """Random latents `[1, tokens, KEY_DIM]`, as a tensor and in blocks."""

    def __init__(self, tokens: int) -> None:
        self.geometry = _native.Geometry(_native.Dtype.bfloat16, 1, KEY_DIM, BLOCK_SIZE, VALUE_DIM, True)
        generator = torch.Generator().manual_seed(tokens)
        self.k = torch.randn((1, tokens, KEY_DIM), generator=generator).to(torch.bfloat16)
        self.q = torch.randn((Q_HEADS, 1, KEY_DIM), generator=generator).to(torch.bfloat16)
        blocks = -(-tokens // BLOCK_SIZE)
        self.memory = huge_pages(blocks * self.geometry.block_bytes)
        self.table = np.uint64(self.memory.ctypes.data) + np.arange(blocks, dtype=np.uint64) * np.uint64(
            self.geometry.block_bytes
        )
        self.counts = np.full(blocks, BLOCK_SIZE, np.int32)
        self.counts[-1] = tokens - (blocks - 1) * BLOCK_SIZE
        assert _native.append(self.geometry, self.table, 0, bits(self.k), None) is None

    def attend(self, out: torch.Tensor) -> None:
        _native.attend(self.geometry, bits(self.q), self.table, self.counts, 0, SCALE, bits(out))


def matmuls(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Two products with a softmax between them. q: `[Q_HEADS, KEY_DIM]`, k: `[tokens, KEY_DIM]`."""
    return torch.softmax(q @ k.T * SCALE, dim=-1) @ k[:, :VALUE_DIM]


def sdpa(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The heads as queries of one head."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[None, None], k[None, None], k[None, None, :, :VALUE_DIM], scale=SCALE
    )[0, 0]


def sdpa_padded(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The same with values as long as keys, for which torch has a kernel of its own."""
    out = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], k[None, None], scale=SCALE)
    return out[0, 0, :, :VALUE_DIM]


def decode(tokens: int) -> None:
    latents = Latents(tokens)
    out = torch.empty((Q_HEADS, 1, VALUE_DIM), dtype=torch.bfloat16)
    q, k = latents.q[:, 0], latents.k[0]
    forms = {"matmul": matmuls, "sdpa": sdpa, "sdpa_padded": sdpa_padded}
    seconds = measure(
        {
            "kvdb": lambda: latents.attend(out),
            "read": lambda: _native.read_blocks(latents.geometry, latents.table),
            **{f"torch_{name}": lambda form=form: form(q, k) for name, form in forms.items()},  # type: ignore[misc]
        },
        rounds=15,
    )
    fastest = fastest_of_torch(seconds)
    products = Q_HEADS * (KEY_DIM + VALUE_DIM) * tokens
    figures = {
        "of_read_bandwidth": seconds["read"] / seconds["kvdb"],
        "speedup_over_fastest_torch": seconds[fastest] / seconds["kvdb"],
    }
    report(
        "latents/decode",
        tokens=tokens,
        dtype="bfloat16",
        isa=_native.kernels()["prefill"],
        threads=_native.threads(),
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
        read_gb_s=latents.memory.size / seconds["read"] / 1e9,
        kvdb_gflops=2 * products / seconds["kvdb"] / 1e9,
        fastest_torch=fastest,
        **figures,
        error=difference(out[:, 0], matmuls(q.double(), k.double())),
    )
    for name, value in seconds.items():
        sys.stderr.write(f"{tokens:8} tokens  {name:18} {1e3 * value:9.2f} ms\n")
    for name, value in figures.items():
        sys.stderr.write(f"{tokens:8} tokens  {name:28} {value:.3f}\n")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768])
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(_native.threads())
    report("machine", **machine(), torch_threads=torch.get_num_threads(), isas=_native.isas())
    for tokens in given.tokens:
        decode(tokens)


if __name__ == "__main__":
    main()
