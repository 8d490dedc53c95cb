"""How fast is attention of many query heads over one row of latents a token, beside torch and beside what memory delivers? And
how fast where an indexer selects the tokens, beside reading all?

    python -m benchmarks.latents [decode] [trained] [--tokens 32768]

MLA, as DeepSeek V3 decodes: 128 query heads share one KV head of 576 numbers a token, of which the first 512 are the value. One
query of one layer in bfloat16. `trained`: as DeepSeek V3.2 decodes, the indexer's 64 heads of 128 numbers score the tokens, and
the 2,048 of the largest scores are attended. One JSON line per measurement, and a table to stderr; the candidates of a line ran
interleaved, figures are medians.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from benchmarks.attend import bits, difference, fastest_of_torch
from benchmarks.harness import argument_parser, huge_pages, machine, measure, report
from kvdb import _native

Q_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE = 128, 576, 512, 64
INDEX_HEADS, INDEX_DIM, TOP = 64, 128, 2048
SCALE = 192**-0.5
"""A head has 128 numbers, and 64 that tell positions, before its product with the latents' matrices."""


class Latents:
    """Random latents `[1, tokens, dim]`, as a tensor and in blocks. value_dim: 0 for keys of an indexer."""

    def __init__(self, tokens: int, dim: int = KEY_DIM, value_dim: int = VALUE_DIM) -> None:
        self.geometry = _native.Geometry(_native.Dtype.bfloat16, 1, dim, BLOCK_SIZE, value_dim, value_dim > 0)
        generator = torch.Generator().manual_seed(tokens + dim)
        self.k = torch.randn((1, tokens, dim), generator=generator).to(torch.bfloat16)
        self.q = torch.randn((Q_HEADS, 1, dim), generator=generator).to(torch.bfloat16)
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


class Indexer:
    """An indexer's keys, and what one query asks of it. halves: whether its queries are numbers of bfloat16, as a model that
    computes in bfloat16 has them."""

    def __init__(self, tokens: int, *, halves: bool) -> None:
        self.keys = Latents(tokens, INDEX_DIM, 0)
        generator = torch.Generator().manual_seed(tokens)
        queries = torch.randn((INDEX_HEADS, 1, INDEX_DIM), generator=generator)
        self.queries = (queries.to(torch.bfloat16).float() if halves else queries).numpy()
        self.weights = torch.rand((INDEX_HEADS, 1), generator=generator).numpy()
        self.scores = np.empty((1, tokens), np.float32)
        self.ids, self.found = np.empty((1, TOP), np.int32), np.empty(1, np.int32)

    @property
    def asked(self) -> tuple[Any, ...]:
        return self.keys.geometry, self.queries, self.weights, self.keys.table, self.keys.counts

    def score(self) -> None:
        _native.indexer_scores(*self.asked, self.scores)

    def select(self) -> None:
        _native.indexer_select(*self.asked, self.ids, self.found)

    def misses(self) -> int:
        """How many of the selected tokens are not among those of the largest scores in float64."""
        products = torch.relu(torch.from_numpy(self.queries[:, 0]).double() @ self.keys.k[0].T.double())
        best = torch.topk(torch.from_numpy(self.weights[:, 0]).double() @ products, TOP).indices.numpy()
        return TOP - len(np.intersect1d(self.ids[0], best))


def trained(tokens: int) -> None:
    """One layer's step by a model's own selection, beside reading all exactly."""
    for halves in (True, False):
        _trained(tokens, "bfloat16" if halves else "float32", Indexer(tokens, halves=halves))


def _trained(tokens: int, queries: str, indexer: Indexer) -> None:
    latents = Latents(tokens)
    out, whole = (torch.empty((Q_HEADS, 1, VALUE_DIM), dtype=torch.bfloat16) for _ in range(2))
    blocks = latents.table, latents.counts, indexer.ids, indexer.found

    def chosen() -> None:
        _native.attend_chosen(latents.geometry, bits(latents.q), *blocks, SCALE, bits(out))

    def step() -> None:
        indexer.select()
        chosen()

    seconds = measure(
        {
            "step": step,
            "everything": lambda: latents.attend(whole),
            "scores": indexer.score,
            "selection": indexer.select,  # scores among it
            "attention": chosen,
            "read_keys": lambda: _native.read_blocks(indexer.keys.geometry, indexer.keys.table),
        },
        rounds=15,
    )
    products = INDEX_HEADS * INDEX_DIM * tokens
    figures = {
        "step_of_everything": seconds["step"] / seconds["everything"],
        "scores_of_read_bandwidth": seconds["read_keys"] / seconds["scores"],
    }
    rows = latents.k[0, torch.from_numpy(indexer.ids[0]).long()].double()
    report(
        "latents/trained",
        tokens=tokens,
        top=TOP,
        dtype="bfloat16",
        index_queries=queries,
        isa=_native.kernels()["prefill"],
        threads=_native.threads(),
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
        read_gb_s=indexer.keys.memory.size / seconds["read_keys"] / 1e9,
        scores_gflops=2 * products / seconds["scores"] / 1e9,
        **figures,
        misses_of_float64=indexer.misses(),
        error=difference(out[:, 0], matmuls(latents.q[:, 0].double(), rows)),
    )
    compared = f"{tokens:8} tokens, {queries} index queries"
    for name, value in seconds.items():
        sys.stderr.write(f"{compared}  {name:18} {1e3 * value:9.2f} ms\n")
    for name, value in figures.items():
        sys.stderr.write(f"{compared}  {name:28} {value:.3f}\n")


BENCHMARKS = {"decode": (decode, 32768), "trained": (trained, 131072)}
"""What is measured, and over how many tokens."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure, of {', '.join(BENCHMARKS)} (default all)")
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths (default 32768, and 131072 for trained)")
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(BENCHMARKS)}")
    torch.set_grad_enabled(False)
    torch.set_num_threads(_native.threads())
    report("machine", **machine(), torch_threads=torch.get_num_threads(), isas=_native.isas())
    for name in given.names or BENCHMARKS:
        benchmark, length = BENCHMARKS[name]
        for tokens in given.tokens or [length]:
            benchmark(tokens)


if __name__ == "__main__":
    main()
