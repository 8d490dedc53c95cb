"""Others that answer the same question: torch's attention, FlexAttention, FlashInfer where it is installed.

Each maker takes queries `[sequences, q_heads, head_dim]` over a cache of equally long sequences and returns a function that
attends and gives the same shape. What cannot run here says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cache import Cache
from benchmarks.gpu.card import Card

Attend = Callable[[], torch.Tensor]
Maker = Callable[[Card, Cache, torch.Tensor, float], Attend]
WORKSPACE_BYTES = 256 << 20
"""What FlashInfer asks for."""
COMPILED = "FlexAttention"
"""For each shape, which takes a while."""
ON_CARD = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
"""The ways of SDPA that read a group's keys and values once. The one without a kernel of its own would write them out for every
query head, which no card has room for at these sizes."""


def sdpa(backend: SDPBackend, *, grouped: bool) -> Maker:
    """grouped: hand the query heads of a group over as the rows of one head, instead of by enable_gqa."""

    def make(_: Card, cache: Cache, q: torch.Tensor, scale: float) -> Attend:
        sequences, kv_heads = cache.sequences, cache.layout.kv_heads
        shaped = q.view(sequences, kv_heads, -1, q.shape[-1]) if grouped else q[:, :, None]

        def attend() -> torch.Tensor:
            with sdpa_kernel(backend):
                out = functional.scaled_dot_product_attention(shaped, cache.k, cache.v, scale=scale, enable_gqa=not grouped)
            return out.reshape(q.shape)

        return attend

    return make


def flex(card: Card, cache: Cache, q: torch.Tensor, scale: float) -> Attend:
    """Compiled for this shape, no mask. Without a card as it is, since compiling for the CPU takes longer than anything here."""
    from torch.nn.attention.flex_attention import flex_attention  # costs an import of torch's compiler

    attention: Any = flex_attention
    if not card.interpreted:
        torch._dynamo.reset()  # shapes of earlier calls would make it compile for any shape
        attention = torch.compile(flex_attention, dynamic=False)

    def attend() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            return attention(q[:, :, None], cache.k, cache.v, scale=scale, enable_gqa=True).reshape(q.shape)

    return attend


def flashinfer(card: Card, cache: Cache, q: torch.Tensor, scale: float) -> Attend:
    """On kvdb's own pages."""
    import flashinfer as library  # installed on few machines

    layout, elements = cache.layout, cache.pages.elements
    planes = []
    for at in (0, layout.values_at // elements.element_size()):
        area = elements[:, at : at + layout.kv_heads * layout.block_size * layout.head_dim]
        planes.append(area.unflatten(1, (layout.kv_heads, layout.block_size, layout.head_dim)))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=card.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    tables, tokens = cache.tables, torch.tensor(cache.tokens)
    begin = torch.tensor([0, *(len(table) for table in tables)]).cumsum(0).to(card.device, torch.int32)
    last = ((tokens - 1) % layout.block_size + 1).to(card.device, torch.int32)
    wrapper.plan(
        begin,
        torch.cat(tables),
        last,
        q.shape[1],
        layout.kv_heads,
        layout.head_dim,
        layout.block_size,
        q_data_type=q.dtype,
        kv_data_type=elements.dtype,
        sm_scale=scale,
    )
    return lambda: wrapper.run(q, tuple(planes))


def makers(card: Card) -> dict[str, Maker]:
    if card.interpreted:
        return {"torch SDPA": sdpa(SDPBackend.MATH, grouped=False), COMPILED: flex}
    ways = {f"torch SDPA {name}": sdpa(backend, grouped=False) for name, backend in ON_CARD.items()}
    ways |= {f"torch SDPA {name}, grouped": sdpa(backend, grouped=True) for name, backend in ON_CARD.items()}
    return {**ways, COMPILED: flex, "FlashInfer": flashinfer}


class Refused(Exception):
    """Somebody else's attention does not run here, or not rightly."""


@contextmanager
def refusals() -> Iterator[None]:
    """Whatever other libraries raise becomes Refused: it is no failure of ours, and the table says it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says with warnings why it will not take a way
            yield
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise Refused(f"{type(error).__name__}: {said[0][:120]}") from error
