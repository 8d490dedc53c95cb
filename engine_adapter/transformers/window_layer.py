"""A layer of the cache whose queries see the last tokens only.

Its session holds the whole context, as that of any layer, so that others can go on from it; it is brought up to date and not
asked, because what a query sees is a few tokens, which the layer keeps beside the model.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from engine_adapter.transformers.cache import MakeLayer, Row, SessionBatch, SessionLayer
from engine_adapter.transformers.support import windows_of


class WindowLayer(SessionLayer):
    """window: how many columns a query sees, its own included, as transformers counts them.

    Keeps the last columns of every row, `[rows, kv_heads, n, head_dim]`, and reads them from the sessions where it has none.
    Padding stands before the tokens of each row.
    """

    def __init__(self, number: int, batch: SessionBatch, length: int, window: int) -> None:
        super().__init__(number, batch, length)
        self.window = window
        self._seen_before = window - 1
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values of the last columns

    def select(self, indices: list[int]) -> None:
        if self._kept is not None:
            self._kept = self._kept[0][indices], self._kept[1][indices]

    def set_length(self, length: int) -> None:
        super().set_length(length)
        self._kept = None

    def take_back(self, columns: int) -> None:
        super().take_back(columns)
        if self._kept is not None:
            k, v = self._kept
            left = k.shape[2] - columns
            self._kept = (k[:, :, :left], v[:, :, :left]) if left >= min(self.length, self._seen_before) else None

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        before = self._before(k)
        for i, row in enumerate(self.batch.rows):
            row.session.update(self.number, k[i], v[i], start=self.length - row.padding)
        seen = min(self.length, self._seen_before)
        keys, values = (torch.cat([old[:, :, old.shape[2] - seen :], new], 2) for old, new in zip(before, (k, v), strict=True))
        self._kept = keys, values
        return scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=self._mask(q.shape[2], seen, q.device),
            scale=self.batch.spec.softmax_scale,
            enable_gqa=True,
        )

    def _mask(self, n: int, seen: int, device: torch.device) -> torch.Tensor:
        """Which columns each of the n last ones sees, bool `[rows, 1, n, seen + n]`."""
        column = torch.arange(self.length - seen, self.length + n, device=device)
        own = column[seen:, None]
        visible = (column <= own) & (column >= own - self._seen_before)
        padding = torch.tensor([row.padding for row in self.batch.rows], device=device)
        real = column >= padding[:, None]
        return (visible & real[:, None]).unsqueeze(1)

    def _before(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of at least those columns before the new ones that their first query sees."""
        if self._kept is None:
            pairs = [self._read(row, like) for row in self.batch.rows]
            self._kept = torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])
        return self._kept

    def _read(self, row: Row, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last columns of a row, zero where they are padding."""
        end = self.length - row.padding
        begin = max(self.length - self._seen_before, 0)
        first = max(begin - row.padding, 0)
        shape = like.shape[1], self.length - begin, like.shape[3]
        k, v = torch.zeros(shape, dtype=like.dtype), torch.zeros(shape, dtype=like.dtype)
        tokens = end - first
        if tokens > 0:
            out = k[:, k.shape[1] - tokens :], v[:, v.shape[1] - tokens :]
            row.session.read(self.number, first, end, out=out)
        return k.to(like.device), v.to(like.device)


def layers_of(model: PreTrainedModel) -> MakeLayer:
    """What makes the layers of a model's cache."""
    windows = windows_of(model)

    def make(number: int, batch: SessionBatch, length: int) -> SessionLayer:
        window = windows[number]
        return SessionLayer(number, batch, length) if window is None else WindowLayer(number, batch, length, window)

    return make
