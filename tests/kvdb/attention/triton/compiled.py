"""Compiles the kernels that the specimens would launch, for cards that need not be there.

Command line: `python -m tests.kvdb.attention.triton.compiled 80 90`.

Runs in a process of its own, without Triton's interpreter. Prints one line of JSON for each kernel and set of constants:
registers of a thread, bytes it spills, shared memory, and the widths of its asynchronous copies.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kvdb.attention.triton.specimens import SPECIMENS

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def source(kernel, args, kwargs) -> ASTSource:
    """The kernel as Triton specialises it for these arguments: pointers, and integers that are multiples of 16, are aligned."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default)
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or value is True or value is False or is_one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def resources(compiled) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        said = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]) + int(found["LOCAL"])}


def compiling(card: int, name: str, seen: set[tuple[int, str]]):
    """In place of a launch: compiles the kernel. One that a specimen launches along the way is compiled once a card."""

    def run(kernel, *args, grid, warmup, **kwargs):
        if SPECIMENS[name].copies is None and (card, kernel.__name__) in seen:
            return
        seen.add((card, kernel.__name__))
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
        compiled = triton.compile(source(kernel, args, kwargs), target=GPUTarget("cuda", card, 32), options=options)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], 0x(\w+)", compiled.asm["ptx"])
        line = {"card": card, "specimen": name, "kernel": kernel.__name__, "shared": compiled.metadata.shared}
        line |= {"copies": [int(width, 16) for width in copies]} | options | resources(compiled)
        sys.stdout.write(json.dumps(line) + "\n")

    return run


def main(cards: list[int]) -> None:
    """Compile the specimens of these cards."""
    seen: set[tuple[int, str]] = set()
    for card in cards:
        for name, specimen in SPECIMENS.items():
            if card in specimen.cards:
                JITFunction.run = compiling(card, name, seen)
                specimen.launch()


if __name__ == "__main__":
    main([int(card) for card in sys.argv[1:]])
