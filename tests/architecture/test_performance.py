"""What docs/performance.md says of constants is what the code has."""

import re
from importlib import import_module
from typing import Any

import pytest

from indexes.hnsw.settings import Settings
from tests.architecture.source import ROOT

TEXT = (ROOT / "docs" / "performance.md").read_text()
ROWS = re.findall(r"^\| `((?:indexes|query_optimizer)\.[\w.]+)` \| ([\d.e+-]+) \|$", TEXT, re.MULTILINE)


def constant(path: str) -> Any:
    """The value of a dotted path: a module, then attributes."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            value = getattr(value, name)
        return value
    raise LookupError(path)


@pytest.mark.parametrize(("path", "said"), ROWS)
def test_the_constants_are_those_of_the_code(path: str, said: str) -> None:
    assert constant(path) == float(said)


def test_the_table_is_found_and_the_walks_begin_where_the_text_says() -> None:
    assert len(ROWS) >= 25
    settings = Settings()
    assert f"{settings.random + settings.starts} d" in TEXT
    walk = (constant("indexes.hnsw.cost.WALK_JUMPS") + constant("indexes.hnsw.cost.FOUND_JUMPS") * 72) * 5.1
    assert f"| {round(walk)} for each doubling" in TEXT
