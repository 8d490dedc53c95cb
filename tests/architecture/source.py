"""The four packages as syntax trees, for the tests beside this file."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine_adapter", "kvdb", "query_optimizer", "indexes")
GENERATED = ("_pb2.py", "_pb2.pyi")


@dataclass(frozen=True, eq=False)
class Module:
    """One Python file, or the stub of a compiled one."""

    name: str
    path: Path
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def generated(self) -> bool:
        return self.path.name.endswith(GENERATED)

    def __str__(self) -> str:
        return str(self.path)


def read(root: Path, *directories: str) -> list[Module]:
    """Every module below these directories; a stub only where there is no Python file beside it."""
    files = [path for directory in directories for path in sorted((root / directory).rglob("*.py*"))]
    files = [path for path in files if path.suffix == ".py" or (path.suffix == ".pyi" and not path.with_suffix(".py").exists())]
    return [_module(root, path) for path in files]


@cache
def modules() -> list[Module]:
    """The modules of the four packages."""
    return read(ROOT, *PACKAGES)


def imports(module: Module, known: set[str]) -> set[str]:
    """Which known modules this one imports: at the top, in a function, or for types only."""
    found = {_longest_known(name, known) for name in _imported_names(module.tree)}
    return {name for name in found if name is not None and name != module.name}


def foreign_imports() -> str:
    """The import statements of the four packages that name other libraries which are installed, as a script."""
    statements = {
        ast.unparse(node)
        for module in modules()
        for node in _run_time_nodes(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not set(PACKAGES) & (tops := {name.split(".")[0] for name in _imported_names(node)})
        and all(map(find_spec, tops))
    }
    return "\n".join(sorted(statements))


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything in a module but what is there for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from _run_time_nodes(node)


def _module(root: Path, path: Path) -> Module:
    text = path.read_text()
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path.relative_to(root), text)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _longest_known(name: str, known: set[str]) -> str | None:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None
