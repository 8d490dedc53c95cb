"""The kernels' tests on a card. They make tensors of the CPU, for the interpreter; where kernels are compiled, each launch takes
copies of these on the card, and what it leaves there is copied back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

ROUNDING = 5e-3
"""Relative, of an output whose softmax weights were multiplied in 16 bits, as a card does and the interpreter does not."""


class Mirror:
    """Tensors of the CPU on another device, those that share memory sharing it there too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, x: Any) -> Any:
        """What is no tensor of the CPU stays what it is."""
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or x.untyped_storage().nbytes() == 0:
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._copies:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._copies[storage.data_ptr()] = whole, whole.to(self._device, copy=True)
        copy = self._copies[storage.data_ptr()][1]
        there = torch.empty(0, dtype=x.dtype, device=copy.device)
        return there.set_(copy.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    def back(self) -> None:
        """Whatever was changed there is changed here."""
        for whole, copy in self._copies.values():
            whole.copy_(copy)


@contextmanager
def launched_on(device: torch.device) -> Iterator[None]:
    real = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mirror = Mirror(device)
        launched = real(self, *map(mirror.of, args), **{name: mirror.of(x) for name, x in kwargs.items()})
        mirror.back()
        return launched

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real
