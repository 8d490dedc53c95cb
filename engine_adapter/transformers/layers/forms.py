"""How the two tensors that attention keeps of its tokens, transformers' keys and values, are kvdb's keys and values."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_adapter.transformers.layers.base import Tokens


class TokenForm(Protocol):
    """Keys and values of a row, `[heads, n, dim]`."""

    values: str
    """Where values are, as in `kvdb.Attention.values`."""

    def joined(self, keys: Tensor, values: Tensor, /) -> Tokens:
        """What kvdb stores of them."""
        ...

    def split(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """What the model keeps."""
        ...


@dataclass(frozen=True)
class OwnValues:
    """Keys and values beside one another."""

    values = "own"

    def joined(self, keys: Tensor, values: Tensor) -> Tokens:
        return Tokens(keys, values)

    def split(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        assert tokens.v is not None
        return tokens.k, tokens.v


@dataclass(frozen=True)
class Latents:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): transformers keeps the latent as the key, and the rotated part
    that all heads share as the value. kvdb's key is both, and its value the latent.

    latent: the numbers of a latent.
    """

    latent: int
    values = "keys"

    def joined(self, keys: Tensor, values: Tensor) -> Tokens:
        return Tokens(torch.cat([keys, values], -1))

    def split(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return tokens.k[..., : self.latent], tokens.k[..., self.latent :]


@dataclass(frozen=True)
class KeysAsValues:
    """A value is its key (DeepSeek-V4)."""

    values = "keys"

    def joined(self, keys: Tensor, _values: Tensor, /) -> Tokens:
        return Tokens(keys)

    def split(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return tokens.k, tokens.k
