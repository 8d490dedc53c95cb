"""What a layer of a model's own cache keeps, as kvdb stores it: `LayerKind`.

A layer keeps up to two things: rows of every token (keys and values, `kvdb.Attention`), and arrays that stand for everything
before a position (`kvdb.State`). Each is a part, and each part is a layer of the model's spec.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import kvdb

Description = kvdb.Attention | kvdb.State


class Tokens(NamedTuple):
    """What a layer keeps of n tokens of one sequence.

    k: `[kv_heads, n, key_dim]`. v: `[kv_heads, n, value_dim]`, None where a value is the beginning of its key. indexer: the keys
    of the model's own selection, `[1, n, dim]`, None without.
    """

    k: Tensor
    v: Tensor | None = None
    indexer: Tensor | None = None

    def all(self) -> tuple[Tensor, ...]:
        """The tensors that there are."""
        return tuple(states for states in self if states is not None)

    def last(self, n: int) -> "Tokens":
        """The last n tokens."""
        return Tokens(*(None if states is None else states[:, states.shape[1] - n :] for states in self))  # type: ignore[arg-type]


Snapshot = dict[str, Tensor]
"""What a layer keeps of everything before a position, by the names of its `kvdb.State`."""

Part = Tokens | Snapshot


class Windowed(Protocol):
    """A layer that lets tokens go: what kvdb stores of keys and values that are noted as they come."""

    @property
    def form(self) -> "JoinsTokens": ...


class JoinsTokens(Protocol):
    """A part of `forms.TokenForm`."""

    def joined(self, keys: Tensor, values: Tensor, /) -> Tokens: ...


class LayerKind(Protocol):
    """One layer of a model's cache. The arrays of a row are as `descriptions` say, in this order."""

    descriptions: tuple[Description, ...]
    padded: bool
    """Whether columns of padding before a row's tokens change nothing of what the layer keeps of them."""

    @property
    def windowed(self) -> Windowed | None:
        """The part that lets tokens go which no query can see any more; None for a layer that keeps all of its tokens."""
        ...

    def taken(self, layer: Any, row: int, start: int, stop: int, /) -> tuple[Part, ...]:
        """What the layer keeps of columns [start, stop) of a row of its batch; views, not copies. A state is that at the layer's
        end. A layer with a window must hold the columns still."""
        ...

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], columns: int, /) -> None:
        """Make a fresh layer hold `columns` columns of a batch. Each row brings what `needed_from` says of its tokens, which end
        at the last column; padding stands before them. The layer takes over the arrays of a single row."""
        ...


def needed_from(description: kvdb.Attention, tokens: int) -> int:
    """The first token that the query behind `tokens` tokens sees."""
    return 0 if description.window is None else max(tokens - description.window + 1, 0)


def held_columns(states: Tensor, length: int, start: int, stop: int) -> Tensor:
    """Columns [start, stop) of tensors that end at column `length`, `[..., columns, dim]`."""
    first = length - states.shape[-2]
    assert first <= start <= stop <= length, f"columns [{start}, {stop}) of [{first}, {length})"
    return states[..., start - first : stop - first, :]


def stacked(rows: Sequence[Tensor], columns: int) -> Tensor:
    """Rows `[heads, n, dim]` as a batch `[rows, heads, columns, dim]`; zeros stand before what is shorter. A single
    row is not copied."""
    if all(row.shape[1] == columns for row in rows):
        return together(rows)
    batch = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, rows[0].shape[2])
    for i, row in enumerate(rows):
        n = min(row.shape[1], columns)
        batch[i, :, columns - n :] = row[:, row.shape[1] - n :]
    return batch


def together(rows: Sequence[Tensor]) -> Tensor:
    """Arrays of rows as those of a batch, `[rows, ...]`. That of a single row is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))


def copied(row: Sequence[tuple[Part, ...]]) -> list[tuple[Part, ...]]:
    """What each layer keeps of a row, in arrays of its own."""
    return [tuple(_copied(part) for part in parts) for parts in row]


def _copied(part: Part) -> Part:
    if isinstance(part, dict):
        return {name: states.clone() for name, states in part.items()}
    k, v, indexer = (None if states is None else states.clone() for states in part)
    assert k is not None
    return Tokens(k, v, indexer)
