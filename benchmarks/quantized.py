"""How fast is exact attention over quantized blocks, beside the same tokens in bfloat16, and how far off is it?

    python -m benchmarks.quantized [tokens ...]

One JSON line a length; the candidates ran interleaved, figures are medians. `error` is that of the answer beside attention over
bfloat16 in float32, `keys` and `values` what quantizing changed in them, `float8_keys` what e4m3 with a scale for each
key would change. Keys and values are normally distributed, which is the
hardest there is for the values: an answer is a mean of many, and as small as the noise.
"""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from benchmarks.attend import BLOCK_SIZE, HEAD_DIM, KV_HEADS, Q_HEADS, SCALE, Context, bits
from benchmarks.harness import argument_parser, huge_pages, machine, measure, report
from kvdb import _native

FORMATS = [_native.BlockFormat.int8, _native.BlockFormat.int8_int4, _native.BlockFormat.int4]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def float8_error(rows: np.ndarray) -> float:
    """What e4m3, the float8 that is precise, changes in float32 rows of which each has a scale."""
    scale = np.abs(rows).max(axis=-1, keepdims=True) / float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    return relative_error((rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale, rows)


def quantized(tokens: int) -> None:
    context = Context(tokens, "bfloat16")
    q = bits(context.query(1))
    tables, memory, rounding = {"bfloat16": context.table}, [], {}
    for block_format in FORMATS:
        nbytes = _native.block_bytes(context.geometry, block_format)
        memory.append(huge_pages(len(context.table) * nbytes))
        table = np.uint64(memory[-1].ctypes.data) + np.arange(len(context.table), dtype=np.uint64) * np.uint64(nbytes)
        changed = _native.quantize(context.geometry, block_format, context.table, tokens, table)
        rounding[block_format.name] = (changed[0] / changed[1]) ** 0.5, (changed[2] / changed[3]) ** 0.5
        tables[block_format.name] = table | np.uint64(block_format.value)
    outs = {name: np.empty((Q_HEADS, 1, HEAD_DIM), np.float32) for name in tables}
    attend = partial(_native.attend, context.geometry, q)
    seconds = measure(
        {name: partial(attend, table, context.counts, 0, SCALE, outs[name]) for name, table in tables.items()}, rounds=31
    )
    report(
        "quantized",
        tokens=tokens,
        kv_heads=KV_HEADS,
        block_size=BLOCK_SIZE,
        bfloat16_ms=1e3 * seconds["bfloat16"],
        float8_keys=float8_error(context.k[0].float().numpy()),
        **{f"{name}_of_bfloat16": seconds[name] / seconds["bfloat16"] for name in rounding},
        **{f"{name}_error": relative_error(outs[name], outs["bfloat16"]) for name in rounding},
        **{f"{name}_keys": keys for name, (keys, _) in rounding.items()},
        **{f"{name}_values": values for name, (_, values) in rounding.items()},
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("tokens", nargs="*", type=int, default=[8192, 32768, 131072], help="lengths (default %(default)s)")
    given = parser.parse_args()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    for tokens in given.tokens:
        quantized(tokens)


if __name__ == "__main__":
    main()
