"""What a session has stored, as rows of a model's cache, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvdb
from engine_adapter.transformers.layers.base import Part, Tokens, needed_from
from engine_adapter.transformers.own.kept_model import KeptModel

Readable = Any
"""A `kvdb.Session` or a `kvdb.Context`."""


def row_of(kept: KeptModel, source: Readable, tokens: int) -> list[tuple[Part, ...]]:
    """What each layer needs of a stored sequence of so many tokens to go on behind them. States are those at its end."""
    return [
        tuple(_part(kept, source, number, part, tokens) for number, part in zip(numbers, kind.descriptions, strict=True))
        for numbers, kind in zip(kept.numbers, kept.kinds, strict=True)
    ]


def _part(kept: KeptModel, source: Readable, number: int, part: kvdb.Attention | kvdb.State, tokens: int) -> Part:
    device, dtype = kept.model.device, kept.model.dtype
    if isinstance(part, kvdb.State):
        return {name: _tensor(states).to(device) for name, states in source.state(number, tokens).items()}
    start = needed_from(part, tokens)
    shape = part.kv_heads, tokens - start
    k = torch.empty(*shape, part.key_dim, dtype=dtype)
    v = torch.empty(*shape, part.width_of_values if part.values == "own" else 0, dtype=dtype)
    source.read(number, start, tokens, out=(k, v))
    indexer = _tensor(source.read_indexer(number, start, tokens)).to(device) if part.indexer is not None else None
    return Tokens(k.to(device), v.to(device) if part.values == "own" else None, indexer)


def put(kept: KeptModel, session: kvdb.Session, start: int, stop: int, row: Sequence[tuple[Part, ...]], *, states: bool) -> None:
    """Append a row's tokens [start, stop) to a session. states: whether its states are kept too, which are those behind
    token `stop`."""
    parts = [pair for numbers, parts in zip(kept.numbers, row, strict=True) for pair in zip(numbers, parts, strict=True)]
    for number, part in parts:
        if isinstance(part, Tokens):
            update(session, number, part, start)
    for number, part in parts:
        if states and not isinstance(part, Tokens):
            session.put_state(number, {name: array(values) for name, values in part.items()}, stop)


def update(session: kvdb.Session, number: int, part: Tokens, start: int) -> None:
    """Append tokens to one layer of a session."""
    k, v, indexer = (None if states is None else states.detach().cpu().contiguous() for states in part)
    session.update(number, k, v, start=start)
    if indexer is not None:
        session.update_indexer(number, indexer, start=start)


def array(states: Tensor) -> Any:
    """A tensor as the database takes states: in main memory."""
    return states.detach().cpu().contiguous()


def _tensor(states: Any) -> Tensor:
    """An array of the database's, which is not to be written, as a tensor of its own."""
    own = np.array(states)
    if own.dtype.name == "bfloat16":  # numpy's is not torch's
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)
