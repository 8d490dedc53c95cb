"""Docstrings are sentences with a subject."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGES, Module, modules

RIDDLES = re.compile(r"(Of|As|By|Whose) ")
"""Beginnings of a docstring that say whose value it is, or by what, before what it is."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_riddle(package: str) -> None:
    own = [module for module in modules() if module.name.partition(".")[0] == package and not module.generated]
    assert not [f"{module}:{line}: {text}" for module in own for line, text in docstrings(module) if RIDDLES.match(text)]


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Every string that stands alone in a module, with its line: docstrings, and those below constants."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.lstrip()
