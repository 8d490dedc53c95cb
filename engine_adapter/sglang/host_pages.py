"""HiCache's pages in main memory, seen as the logical KV that kvdb keeps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from kvdb.errors import Unsupported

Pair = tuple[Tensor, Tensor]

DIRECT, BY_HEAD = "page_first_direct", "page_head"
LAYOUTS = ("layer_first", "page_first", DIRECT, BY_HEAD)
"""The names of SGLang's `--hicache-mem-layout` whose order of dimensions is known here."""


@dataclass(frozen=True)
class HostPages:
    """Pages of tokens in one buffer of SGLang's, whose layout is known by its name.

    buffer: keys and values of all layers, of the dimensions (2: keys and values; L: layers; T: tokens; P: pages; S: tokens of a
    page; H: KV heads; D: head_dim) `[2, L, T, H, D]` for "layer_first", `[2, T, L, H, D]` for "page_first",
    `[2, P, L, S, H, D]` for "page_first_direct", `[2, P, H, S, L, D]` for "page_head".
    """

    buffer: Tensor
    layout: str
    page_size: int

    @classmethod
    def of(cls, pool: Any) -> Self:
        """The pages of a host pool. Raises Unsupported for one whose layout has another order, or other values than keys."""
        if pool.layout not in LAYOUTS:
            raise Unsupported(f"the host pool has the layout {pool.layout!r}; kvdb knows {', '.join(LAYOUTS)}")
        if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
            raise Unsupported(f"values of {pool.v_head_dim} numbers beside keys of {pool.head_dim} cannot be kept in kvdb")
        return cls(pool.kv_buffer, pool.layout, pool.page_size)

    @property
    def layers(self) -> int:
        return self.buffer.shape[{"layer_first": 1, BY_HEAD: 4}.get(self.layout, 2)]

    @property
    def kv_heads(self) -> int:
        return self.buffer.shape[2 if self.layout == BY_HEAD else -2]

    @property
    def head_dim(self) -> int:
        return self.buffer.shape[-1]

    def one(self, flat: Tensor) -> Self:
        """A page outside the pool, as its `get_data_page` flattens it."""
        shape = list(self.buffer.shape)
        if self.layout in (DIRECT, BY_HEAD):
            shape[1] = 1
        else:
            shape[2 if self.layout == "layer_first" else 1] = self.page_size
        return type(self)(flat.reshape(shape), self.layout, self.page_size)

    def views(self, first: int, tokens: int) -> list[Pair]:
        """Keys and values of each layer, both `[kv_heads, tokens, head_dim]`, of a run that `runs` gave; nothing is copied."""
        page, stop = first // self.page_size, first + tokens
        k, v = self.buffer
        match self.layout:
            case "layer_first":
                return [(k[i, first:stop].transpose(0, 1), v[i, first:stop].transpose(0, 1)) for i in range(self.layers)]
            case "page_first":
                return [(k[first:stop, i].transpose(0, 1), v[first:stop, i].transpose(0, 1)) for i in range(self.layers)]
            case "page_first_direct":
                return [(k[page, i].transpose(0, 1), v[page, i].transpose(0, 1)) for i in range(self.layers)]
            case _:
                return [(k[page, :, :, i], v[page, :, :, i]) for i in range(self.layers)]

    def runs(self, indices: Tensor) -> Iterator[tuple[int, int]]:
        """The first token in the buffer, and how many follow each other there, of pages whose tokens are `indices`."""
        firsts = indices[:: self.page_size].tolist()
        joined = self.layout not in (DIRECT, BY_HEAD)
        start = 0
        for stop in range(1, len(firsts) + 1):
            if stop == len(firsts) or not joined or firsts[stop] != firsts[stop - 1] + self.page_size:
                yield firsts[start], (stop - start) * self.page_size
                start = stop
