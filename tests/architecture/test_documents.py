"""What the documents name is there."""

import re
from functools import cache

import pytest

from tests.architecture.source import PACKAGES, ROOT

DOCUMENTS = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks/README.md",
    "docs/engines.md",
    "docs/performance.md",
    *(
        str(page.relative_to(ROOT))
        for folder in ("internals", "decisions")
        for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
)
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w./-]+(\.(py|h|cpp|proto|toml|md)|/)")
CLASS = re.compile(r"_?[A-Z][a-z]+(?:[A-Z][a-z]*)+")


@cache
def sources() -> str:
    folders = (*PACKAGES, "native", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".pyi", ".h", ".cpp"}]
    return "\n".join(path.read_text() for path in files)


@cache
def paths() -> str:
    """Every file and folder, a line each; folders end with a slash."""
    folders = (*PACKAGES, "native", "proto", "tests", "benchmarks", "docs", "examples", "deploy")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    all_paths = [*inside, *ROOT.iterdir()]
    return "\n".join(f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in all_paths) + "\n"


def names(document: str, pattern: re.Pattern[str]) -> list[str]:
    """What stands between backticks outside of examples and is all of this pattern."""
    text = FENCE.sub("", (ROOT / document).read_text())
    return sorted({name for name in CODE.findall(text) if pattern.fullmatch(name)})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document: str) -> None:
    assert not [path for path in names(document, PATH) if f"/{path}\n" not in paths()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_class_exists(document: str) -> None:
    assert not [name for name in names(document, CLASS) if not re.search(rf"\b{name}\b", sources())]
