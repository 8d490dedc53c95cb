"""How fast is exact attention over blocks, beside torch and beside what memory delivers?

    python -m benchmarks.attend [decode] [prefill] [overhead] [append]

One JSON line per measurement; the candidates of a line ran interleaved, figures are medians.
Memory for the blocks lies in huge pages, as in the block pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.harness import argument_parser, huge_pages, machine, measure, per_call, report
from kvdb import _native

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 8, 4, 128, 64
Q_HEADS = KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5
DTYPES = {"float32": (_native.Dtype.float32, torch.float32), "bfloat16": (_native.Dtype.bfloat16, torch.bfloat16)}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as the native module takes it: float32, or uint16 for 16-bit types."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.uint16).numpy()


class Context:
    """Random keys and values [kv_heads, tokens, head_dim], as tensors and in blocks."""

    def __init__(self, tokens: int, dtype: str) -> None:
        native, self.torch_dtype = DTYPES[dtype]
        self.geometry = _native.Geometry(native, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(tokens)
        shape = (KV_HEADS, tokens, HEAD_DIM)
        self.k = torch.randn(shape, generator=generator).to(self.torch_dtype)
        self.v = torch.randn(shape, generator=generator).to(self.torch_dtype)
        blocks = -(-tokens // BLOCK_SIZE)
        self.memory = huge_pages(blocks * self.geometry.block_bytes)
        offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(self.geometry.block_bytes)
        self.table = np.uint64(self.memory.ctypes.data) + offsets
        self.counts = np.full(blocks, BLOCK_SIZE, np.int32)
        self.counts[-1] = tokens - (blocks - 1) * BLOCK_SIZE
        assert _native.append(self.geometry, self.table, 0, bits(self.k), bits(self.v)) is None

    def query(self, n: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(n)
        return torch.randn((Q_HEADS, n, HEAD_DIM), generator=generator).to(self.torch_dtype)

    def attend(self, q: torch.Tensor, out: torch.Tensor, causal: int = 0) -> None:
        _native.attend(self.geometry, bits(q), self.table, self.counts, causal, SCALE, bits(out))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q[None], k[None], v[None], enable_gqa=True, **options)[0]


def matmul_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense attention of one query: two batched products and a softmax."""
    grouped = q.view(KV_HEADS, GROUP, HEAD_DIM)
    weights = torch.softmax(grouped @ k.transpose(1, 2) * SCALE, dim=-1)
    return (weights @ v).view(Q_HEADS, 1, HEAD_DIM)


def sdpa_grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """SDPA with the queries of a group as rows of their KV head. mask: [GROUP * queries, tokens]."""
    rows = q.view(1, KV_HEADS, -1, HEAD_DIM)
    out = torch.nn.functional.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask)
    return out.view(q.shape)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def decode(tokens: int) -> None:
    context = Context(tokens, "bfloat16")
    q = context.query(1)
    out = torch.empty_like(q)
    k32, v32, q32 = context.k.float(), context.v.float(), q.float()
    every = torch.ones((GROUP, tokens), dtype=torch.bool)
    seconds = measure(
        {
            "kvdb": lambda: context.attend(q, out),
            "read": lambda: _native.read_blocks(context.geometry, context.table),
            "torch_matmul_bfloat16": lambda: matmul_softmax(q, context.k, context.v),
            "torch_matmul_float32": lambda: matmul_softmax(q32, k32, v32),
            "torch_sdpa_bfloat16": lambda: sdpa(q, context.k, context.v),
            "torch_sdpa_float32": lambda: sdpa(q32, k32, v32),
            "torch_grouped_bfloat16": lambda: sdpa_grouped(q, context.k, context.v, every),
            "torch_grouped_float32": lambda: sdpa_grouped(q32, k32, v32, every),
        },
        rounds=15,
    )
    read_bytes = context.memory.size
    report(
        "attend/decode",
        tokens=tokens,
        dtype="bfloat16",
        isa=_native.kernels()["decode"],
        threads=_native.threads(),
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
        kvdb_gb_s=read_bytes / seconds["kvdb"] / 1e9,
        read_gb_s=read_bytes / seconds["read"] / 1e9,
        of_read_bandwidth=seconds["read"] / seconds["kvdb"],
        fastest_torch=(fastest := fastest_of_torch(seconds)),
        speedup_over_fastest_torch=seconds[fastest] / seconds["kvdb"],
        error=difference(out, sdpa(q32, k32, v32)),
    )


def sdpa_two_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What torch can do without a mask: the reused tokens, then the new ones causally, merged by their log-sum-exp."""
    new, reused = q.shape[1], k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(GROUP, dim=0)[None] for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past, past_lse = flash(q[None], k[:, :, :reused], v[:, :, :reused], 0.0, False)
    own, own_lse = flash(q[None], k[:, :, reused:], v[:, :, reused:], 0.0, True)
    share = torch.sigmoid(past_lse - own_lse).view(1, Q_HEADS, new, 1)
    return (share * past + (1 - share) * own)[0]


def fastest_of_torch(seconds: dict[str, float]) -> str:
    return min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)


def torch_prefills(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's ways to attend causally behind reused tokens; is_causal knows no offset."""
    new, tokens = q.shape[1], k.shape[1]
    seen = torch.arange(tokens)[None, :] <= (tokens - new + torch.arange(new))[:, None]
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    grouped_seen, grouped_bias = seen.repeat(GROUP, 1), bias.repeat(GROUP, 1)
    return {
        "bias": lambda: sdpa(q, k, v, attn_mask=bias),
        "boolean": lambda: sdpa(q, k, v, attn_mask=seen),
        "two_parts": lambda: sdpa_two_parts(q, k, v),
        "grouped_bias": lambda: sdpa_grouped(q, k, v, grouped_bias),
        "grouped_boolean": lambda: sdpa_grouped(q, k, v, grouped_seen),
    }


def prefill() -> None:
    """Both dtypes in one run, so that each is beside the fastest of torch in any dtype and form."""
    new, reused = 512, 32768
    candidates: dict[str, Callable[[], object]] = {}
    contexts = {dtype: Context(reused + new, dtype) for dtype in DTYPES}
    queries = {dtype: context.query(new) for dtype, context in contexts.items()}
    outs = {dtype: torch.empty_like(q) for dtype, q in queries.items()}
    for dtype, context in contexts.items():
        candidates[f"kvdb_{dtype}"] = partial(context.attend, queries[dtype], outs[dtype], causal=new)
        forms = torch_prefills(queries[dtype], context.k, context.v)
        candidates |= {f"torch_{form}_{dtype}": run for form, run in forms.items()}
    seconds = measure(candidates, rounds=5)
    fastest = fastest_of_torch(seconds)
    products = 2 * Q_HEADS * HEAD_DIM * (new * reused + new * (new + 1) // 2)
    report(
        "attend/prefill",
        new=new,
        reused=reused,
        isa=_native.kernels()["prefill"],
        threads=_native.threads(),
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
        **{f"kvdb_{dtype}_gflops": 2 * products / seconds[f"kvdb_{dtype}"] / 1e9 for dtype in DTYPES},
        fastest_torch=fastest,
        **{f"{dtype}_over_fastest_torch": seconds[fastest] / seconds[f"kvdb_{dtype}"] for dtype in DTYPES},
        **{
            f"{dtype}_error": difference(outs[dtype], sdpa_two_parts(queries[dtype].float(), c.k.float(), c.v.float()))
            for dtype, c in contexts.items()
        },
    )


def overhead(tokens: int) -> None:
    context = Context(tokens, "bfloat16")
    q = bits(context.query(1))
    out = np.empty_like(q)
    geometry, table, counts = context.geometry, context.table, context.counts
    k, v = bits(context.k[:, :1]), bits(context.v[:, :1])
    attend_s = per_call(lambda: _native.attend(geometry, q, table, counts, 0, SCALE, out))
    append_s = per_call(lambda: _native.append(geometry, table, tokens - 1, k, v))
    report("attend/overhead", tokens=tokens, dtype="bfloat16", attend_us=1e6 * attend_s, append_one_us=1e6 * append_s)


def append() -> None:
    tokens = 131072
    context = Context(tokens, "bfloat16")
    # As a model's projection leaves them: [tokens, heads, head_dim], seen as [heads, tokens, ...].
    k = context.k.transpose(0, 1).contiguous().transpose(0, 1)
    v = context.v.transpose(0, 1).contiguous().transpose(0, 1)
    flat_k, flat_v = context.k.reshape(-1), context.v.reshape(-1)
    into = torch.empty_like(flat_k), torch.empty_like(flat_v)

    def torch_copy() -> None:
        into[0].copy_(flat_k)
        into[1].copy_(flat_v)

    def fresh() -> None:
        memory = huge_pages(context.memory.size)
        table = context.table - np.uint64(context.memory.ctypes.data)
        table += np.uint64(memory.ctypes.data)
        _native.append(context.geometry, table, 0, bits(context.k), bits(context.v))

    geometry, table = context.geometry, context.table
    k_out, v_out = np.empty_like(bits(context.k)), np.empty_like(bits(context.v))
    seconds = measure(
        {
            "append": lambda: _native.append(geometry, table, 0, bits(context.k), bits(context.v)),
            "append_transposed": lambda: _native.append(geometry, table, 0, bits(k), bits(v)),
            "append_fresh_memory": fresh,
            "gather": lambda: _native.gather(geometry, table, 0, tokens, k_out, v_out),
            "torch_copy": torch_copy,
        },
        rounds=9,
    )
    report(
        "append",
        tokens=tokens,
        dtype="bfloat16",
        payload_mib=context.memory.size / 2**20,
        threads=_native.threads(),
        **{f"{name}_gb_s": context.memory.size / value / 1e9 for name, value in seconds.items()},
    )


def main() -> None:
    benchmarks: dict[str, list[Callable[[], None]]] = {
        "decode": [partial(decode, tokens) for tokens in (8192, 32768, 131072)],
        "prefill": [prefill],
        "overhead": [partial(overhead, tokens) for tokens in (1, 16, 64)],
        "append": [append],
    }
    parser = argument_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure, of {', '.join(benchmarks)} (default all)")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    report("machine", **machine(), torch_threads=torch.get_num_threads(), isas=_native.isas())
    for name in given.names or benchmarks:
        for run in benchmarks[name]:
            run()


if __name__ == "__main__":
    main()
