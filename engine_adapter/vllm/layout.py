"""How vLLM packs the KV of a block, learnt by writing numbers through its own operation or read from its layout's name, and the
logical KV that kvdb keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvdb.errors import Unsupported

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""vLLM's operation: writes keys and values, both `[n, kv_heads, head_dim]`, into a cache, at slots int64 `[n]`."""

DIGIT = 256
"""How many integers, from 0 on, every floating-point type of a cache holds exactly."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each number of a block stands. A cache is a tensor whose first dimension counts blocks, each one run of memory.

    offsets: int64 `[2, kv_heads, block_size, head_dim]`, for keys and values, counted from the first number of a block.
    """

    offsets: Tensor

    @classmethod
    def learn(cls, write: Write, cache: Tensor, kv_heads: int, block_size: int, head_dim: int) -> Self:
        """Push the digits of each number's place through vLLM's operation, and see where they arrive.

        cache: the cache of a layer, of which only form, dtype and device are used. Raises Unsupported where a block holds other
        numbers than these, or holds one of them in another form.
        """
        form = (2, kv_heads, block_size, head_dim)
        count = 2 * kv_heads * block_size * head_dim
        if not cache.is_contiguous() or cache[0].numel() != count:
            raise Unsupported(
                f"a layer's cache is {tuple(cache.shape)}, with strides {cache.stride()}; kvdb knows contiguous blocks of "
                f"{count} numbers, for keys and values of {kv_heads} heads, {block_size} tokens and head_dim {head_dim}"
            )
        places = torch.arange(count, device=cache.device)
        arrived = torch.zeros_like(places)
        weight = 1
        while weight < count:
            k, v = (places // weight % DIGIT).to(cache.dtype).reshape(form).transpose(1, 2).contiguous()
            scratch = torch.zeros_like(cache[:1])
            write(k, v, scratch, torch.arange(block_size, device=cache.device))
            arrived += scratch.reshape(-1).to(torch.int64) * weight
            weight *= DIGIT
        if not torch.equal(arrived.sort().values, places):
            raise Unsupported(
                "vLLM's operation stores numbers in another form than it is given them, so kvdb cannot tell its keys"
            )
        return cls(arrived.argsort().reshape(form))

    @classmethod
    def named(cls, name: str, cache: Tensor, kv_heads: int, block_size: int, head_dim: int) -> Self:
        """The layout that vLLM names by the order of its dimensions in memory, as in "LBNHC": L layers, B blocks, H heads,
        N tokens, C the numbers of a key and, behind them, of its value.

        cache: the cache of a layer, `[blocks, kv_heads, block_size, 2 * head_dim]` with the strides of the name. Raises
        Unsupported for another form, for names whose blocks are not one run of memory, and for strides of another name.
        """
        sizes = {"H": kv_heads, "N": block_size, "C": 2 * head_dim}
        count = kv_heads * block_size * 2 * head_dim
        strides, stride = {}, 1
        for dimension in reversed(name[2:]):
            strides[dimension] = stride
            stride *= sizes.get(dimension, 0)
        expected = (kv_heads, block_size, 2 * head_dim), tuple(strides.get(dimension) for dimension in "HNC")
        if set(name[:2]) != {"L", "B"} or stride != count or (tuple(cache.shape[1:]), cache.stride()[1:]) != expected:
            raise Unsupported(
                f"a layer's cache is {tuple(cache.shape)}, with strides {cache.stride()}, of the layout {name}; kvdb knows "
                f"blocks in one run of memory, with the shape {expected[0]} and the strides of the name"
            )
        h, n, c = torch.meshgrid(*(torch.arange(sizes[dimension], device=cache.device) for dimension in "HNC"), indexing="ij")
        places = h * strides["H"] + n * strides["N"] + c * strides["C"]
        return cls(torch.stack(places.split(head_dim, dim=-1)))

    @property
    def block_size(self) -> int:
        return self.offsets.shape[2]

    def read(self, cache: Tensor, blocks: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """A copy of the keys and values of tokens [start, stop), both `[kv_heads, stop - start, head_dim]`. blocks: those of a
        request, from its first token on."""
        return self.unpack(self.copy(cache, blocks, start, stop), start, stop)

    def copy(self, cache: Tensor, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """A copy of the blocks of tokens [start, stop) as they are packed, `[blocks, numbers]`, for `unpack`: the least that has
        to be done before vLLM writes into them again."""
        first, last = start // self.block_size, -(-stop // self.block_size)
        return self._flat(cache)[torch.tensor(blocks[first:last], device=cache.device)]

    def unpack(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of what `copy` copied, both `[kv_heads, stop - start, head_dim]`."""
        skip = start % self.block_size
        numbers = packed[:, self.offsets.reshape(-1).to(packed.device)].reshape(len(packed), *self.offsets.shape)
        k, v = numbers.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, skip : skip + stop - start].contiguous()
        return k, v

    def write(self, cache: Tensor, blocks: Sequence[int], start: int, kv: tuple[Tensor, Tensor]) -> None:
        """Put the keys and values of n tokens, both `[kv_heads, n, head_dim]`, behind `start` tokens of a request. No other
        number is touched, because vLLM may be writing later tokens of the last block meanwhile."""
        numbers = torch.stack(kv).to(cache.device)
        stop = start + numbers.shape[2]
        flat = self._flat(cache)
        for i in range(start // self.block_size, -(-stop // self.block_size)):
            begin = i * self.block_size
            first, last = max(start, begin), min(stop, begin + self.block_size)
            places = self.offsets[:, :, first - begin : last - begin].reshape(-1)
            with torch.inference_mode():  # as vLLM's caches were made
                flat[blocks[i]][places] = numbers[:, :, first - start : last - start].reshape(-1)

    def _flat(self, cache: Tensor) -> Tensor:
        """The cache as `[blocks, numbers]`, in the order of memory."""
        return cache.as_strided((cache.shape[0], self.offsets.numel()), (cache.stride(0), 1))
