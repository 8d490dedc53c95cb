"""A native module whose calls are remembered, so that they can be made again with other arguments."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KEPT_MAX = 400  # calls that are remembered
SETTINGS = {
    *("isa", "isas", "emulated_isas", "set_isa", "variants", "kernels", "set_kernels", "processor_family", "kernels_of"),
    *("threads", "set_threads", "spin_us", "set_spin_us", "usable_cpus", "cpu_quota", "memory_nodes", "set_memory_nodes"),
    *("pool_counters", "work_in_background", "leave_processor"),
}
"""What holds for the whole process: wrong values of these are tests/native/test_module.py's business."""
TRUSTED = {"Blocks", "interleave"}
"""Calls that take addresses, which cannot be checked, are made as they are."""
RETURNED = {"StepResult", "StepTotals"}
"""Classes of what calls return."""


def entries(module: Any) -> set[str]:
    """The functions, classes and methods of a native module, as `Recorder.entered` names them, that must have been called."""
    found = set()
    for name in public(module):
        target = getattr(module, name)
        if name in SETTINGS or not callable(target) or is_enum(target):
            continue
        if name not in RETURNED:
            found.add(name)
        if isinstance(target, type):
            found |= {f"{name}.{method}" for method in methods(target)}
    return found


def public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def is_enum(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, enum.Enum)


def methods(of: type) -> list[str]:
    return [name for name, value in vars(of).items() if not name.startswith("_") and callable(value)]


class Recorder:
    """Passes calls on to a native module and its classes. entered: the names of all that was called, those of methods with their
    class. Calls within a call of `made` are not remembered apart, nor any within `quiet`."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.entered: set[str] = set()
        self._quiet = False
        for name in public(module):
            target = getattr(module, name)
            if callable(target) and name not in SETTINGS and not is_enum(target):
                target = self._class(name, target) if isinstance(target, type) else self._function(name, target)
            setattr(self, name, target)

    def made(self, target: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Remember a call, and make it."""
        self._remember(target, args, named)
        with self.quiet():
            return target(*args, **named)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Have calls passed on that are not remembered."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _remember(self, target: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._quiet:
            return
        if len(self.calls) >= KEPT_MAX:
            self.calls[random.randrange(KEPT_MAX)] = (target, args, named)
        else:
            self.calls.append((target, args, named))

    def _function(self, name: str, target: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.entered.add(name)
            if name.rpartition(".")[2] not in TRUSTED:
                self._remember(target, args, named)
            return target(*args, **named)

        return call

    def _class(self, name: str, base: type) -> type:
        """A class like it, whose calls are remembered as those of the class itself."""
        recorder = self

        def begin(made: Any, *args: Any, **named: Any) -> None:
            recorder.entered.add(name)
            if name not in TRUSTED:
                recorder._remember(base, args, named)
            base.__init__(made, *args, **named)

        found = {method: self._function(f"{name}.{method}", getattr(base, method)) for method in methods(base)}
        return type(name, (base,), {"__init__": begin, **found})
