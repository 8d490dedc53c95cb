"""kvdb's packages from a checkout in which nothing was compiled, as on a machine that was lent with a card for minutes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

COMPILED = ("indexes._native", "kvdb._native")


class _Named(type):
    """The type of a class, or an enumeration, of which names are known and nothing else."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Missing(ModuleType):
    """Stands in for an extension module: its names are there, for annotations and imports, and nothing of it can be called."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> object:
            raise ImportError(f"{self.__name__}.{name} is not compiled; run make test, or pip install .")

        return _Named(name, (), {"__new__": refuse})


def prepare() -> bool:
    """Whether kvdb is compiled here. If not, whatever needs no compiled code can be imported all the same."""
    compiled = True
    for name in COMPILED:
        package = name.partition(".")[0]
        before = set(sys.modules)
        try:
            importlib.import_module(name)
        except ImportError:
            compiled = False
            for started in set(sys.modules) - before:  # what imported half of itself
                if started.partition(".")[0] == package:
                    del sys.modules[started]
            sys.modules[name] = _Missing(name)
    return compiled
