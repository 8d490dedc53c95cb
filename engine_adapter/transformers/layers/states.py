"""Layers that keep states in place of tokens: LinearAttentionLayer, of DeltaNet, KDA, Mamba-2 and short convolutions."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

import kvdb
from engine_adapter.transformers.layers.base import Part, Snapshot, together

KINDS = ("conv", "recurrent")


def described(arrays: Snapshot, free: frozenset[str] = frozenset()) -> kvdb.State:
    """The description of a row's arrays. free: the names of those whose first dimension differs between snapshots."""
    return kvdb.State(
        {
            name: ((None, *states.shape[1:]) if name in free else tuple(states.shape), str(states.dtype).removeprefix("torch."))
            for name, states in arrays.items()
        }
    )


class StateLayer:
    """The states of convolutions and recurrences behind the last token."""

    padded = True
    windowed = None

    def __init__(self, description: kvdb.State) -> None:
        self.descriptions: tuple[kvdb.Attention | kvdb.State, ...] = (description,)
        self._names = tuple(name for name, *_ in description.arrays)

    def taken(self, layer: Any, row: int, _start: int, _stop: int, /) -> tuple[Part, ...]:
        return (states_of(layer, row),)

    def filled(self, layer: Any, rows: Sequence[tuple[Part, ...]], _columns: int, /) -> None:
        for name in self._names:
            states = together([cast(Snapshot, part)[name] for (part, *_) in rows])
            kind, number = name.split(".")
            put_state(layer, kind, int(number), states)


def states_of(layer: Any, row: int) -> Snapshot:
    """The states that a layer has of a row, such as `conv.0` and `recurrent.0`."""
    held = {f"{kind}.{number}": states for kind in KINDS for number, states in getattr(layer, f"{kind}_states", {}).items()}
    return {name: states[row] for name, states in held.items() if states is not None}


def put_state(layer: Any, kind: str, number: int, states: Tensor) -> None:
    """Give a fresh layer one of its states, `[rows, ...]`, which it writes from now on. This is what
    `LinearAttentionLayer.lazy_initialization` does, without a copy."""
    if kind == "conv":
        layer.conv_kernel_size[number] = states.shape[-1]
        layer.dtype, layer.device = states.dtype, states.device
    getattr(layer, f"{kind}_states")[number] = states.contiguous()
    getattr(layer, f"is_{kind}_states_initialized")[number] = True
    layer.has_previous_state[number] = True
