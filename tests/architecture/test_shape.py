"""How large things may grow, and what must not be in them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Module, modules, read

FILE_LINES_MAX = 300
FUNCTION_LINES_MAX = 60
REASON = re.compile(r"(#|//) size: \w+")
KERNELS = ("kernels", "simd")
RPC_EDGE = ("kvdb/rpc/", "kvdb/server/")
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"torch.load", "eval", "exec"}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
TEXT = {".py", ".pyi", ".cpp", ".h", ".proto", ".toml", ".md", ".txt", ".sh"}

OWN = [module for module in modules() if not module.generated]
BENCHMARKS = read(ROOT, "benchmarks")
NATIVE = [path for path in sorted(ROOT.glob("*/native/**/*")) if path.suffix in {".cpp", ".h"}]


@pytest.mark.parametrize("path", [*(module.path for module in [*OWN, *BENCHMARKS]), *(p.relative_to(ROOT) for p in NATIVE)], ids=str)
def test_a_file_stays_small_or_says_why(path: Path) -> None:
    lines = (ROOT / path).read_text().splitlines()
    if not set(path.parts) & set(KERNELS) and not any(REASON.match(line) for line in lines):
        assert len(lines) <= FILE_LINES_MAX, "split it, or give the reason in a line that begins with `# size:`"


@pytest.mark.parametrize("module", [*OWN, *BENCHMARKS], ids=str)
def test_a_function_stays_short_or_says_why(module: Module) -> None:
    lines = module.text.splitlines()
    long = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            head = lines[node.lineno - 2 : node.body[0].lineno]
            if length > FUNCTION_LINES_MAX and not any(REASON.search(line) for line in head):
                long[node.name] = length
    if not set(module.path.parts) & set(KERNELS):
        assert not long, "split them, or give the reason in a comment above: `# size:`"


@pytest.mark.parametrize("module", OWN, ids=str)
def test_everything_is_caught_only_at_the_rpc_edge(module: Module) -> None:
    if not module.path.as_posix().startswith(RPC_EDGE):
        assert not list(broad_excepts(module.tree))


@pytest.mark.parametrize("module", OWN, ids=str)
def test_nothing_from_outside_can_run_code(module: Module) -> None:
    used = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            used |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & (UNSAFE_MODULES | UNSAFE_CALLS)
        elif isinstance(node, ast.Call):
            used |= {ast.unparse(node.func)} & UNSAFE_CALLS
            used |= {keyword.arg for keyword in node.keywords if keyword.arg in {"allow_pickle", "trust_remote_code"}}
    assert not used


def test_nothing_is_left_unfinished() -> None:
    places = ("engine_adapter", "kvdb", "query_optimizer", "indexes", "proto", "tests", "benchmarks", "scripts")
    files = [path for place in places for path in (ROOT / place).rglob("*")] + list(ROOT.glob("*"))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found


def broad_excepts(tree: ast.Module) -> Iterator[int]:
    """The lines where every exception is caught or suppressed, and not raised again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {"BaseException"} if node.type is None else {ast.unparse(name) for name in _names(node.type)}
            again = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
            if caught & {"Exception", "BaseException"} and not again:
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            if {ast.unparse(argument) for argument in node.args} & {"Exception", "BaseException"}:
                yield node.lineno


def _names(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]
