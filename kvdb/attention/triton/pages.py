"""The slots of one slab, and which of them belong to a sequence, as all kernels read them."""

import os
from dataclasses import dataclass

import torch
import triton.language as tl

from kvdb.storage.slot import SlotLayout

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}
"""Whether kernels run on the CPU under Triton's interpreter, because TRITON_INTERPRET=1 was set before Triton was imported."""


@dataclass(frozen=True)
class Pages:
    """Slots of one layout. slab: uint8 `[slots, layout.nbytes]`, contiguous, on the device."""

    slab: torch.Tensor
    layout: SlotLayout

    @property
    def elements(self) -> torch.Tensor:
        """The slab as keys and values lie in it: `[slots, layout.nbytes / element]` in the layout's format."""
        return self.slab.view(TORCH[self.layout.format])

    @property
    def floats(self) -> torch.Tensor:
        """The slab as float32, for scales and factors."""
        return self.slab.view(torch.float32)

    @property
    def halves(self) -> torch.Tensor:
        """The slab as bfloat16, for centres and bounds."""
        return self.slab.view(torch.bfloat16)

    @property
    def math(self) -> tl.dtype:
        """The dtype that tensor cores multiply. It is float32 under the interpreter, which multiplies no 16-bit floats."""
        if INTERPRETED or self.layout.format == "float32":
            return tl.float32
        return tl.float16 if self.layout.format == "float16" else tl.bfloat16


@dataclass(frozen=True)
class Runs:
    """The blocks of several sequences, ragged. table: int32, slots. begin: int32 `[sequences]`, where in the table a sequence's
    blocks begin. tokens: int32 `[sequences]`, how many it holds; they fill its blocks but for the last. tokens_max: int, what no
    sequence exceeds, known to the host, for the size of launches."""

    table: torch.Tensor
    begin: torch.Tensor
    tokens: torch.Tensor
    tokens_max: int

    @property
    def sequences(self) -> int:
        return int(self.begin.shape[0])


def check_numbers(pages: Pages, **named: torch.Tensor) -> None:
    """Raises ValueError unless these are int32 of one dimension on the pages' device, all of the same length."""
    expected = next(iter(named.values())).shape[:1]
    for name, x in named.items():
        if x.dtype != torch.int32 or x.shape != expected or x.device != pages.slab.device:
            said = f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{said}; expected int32 {tuple(expected)} on {pages.slab.device}")
