"""How large things may grow, and what must not be in them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT, Module, modules, read

FILE_LINES_MAX, NOUN_LINES_MAX = 300, 600
"""Of a file, and of one that is a single noun and says so."""
FUNCTION_LINES_MAX = 60
REASON = re.compile(r"(#|//) size: \w+")
KERNELS = {"kernels", "simd"}
RPC_EDGE = ("kvdb/rpc/", "kvdb/server/")
CARRIED = "kvdb/client/remote/aio/carried.py"
"""Catches what a step raises to raise it in the function that waits for the step."""
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"torch.load", "eval", "exec"}
UNSAFE_ARGUMENTS = {"allow_pickle", "trust_remote_code"}
EVERYTHING = {"Exception", "BaseException"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
TEXT = {".py", ".pyi", ".cpp", ".h", ".proto", ".toml", ".md", ".txt", ".sh"}

OWN = [module for module in modules() if not module.generated]
BENCHMARKS = read(ROOT, "benchmarks")


def test_files_stay_small_or_say_why() -> None:
    native = [path.relative_to(ROOT) for path in ROOT.glob("*/native/**/*") if path.suffix in {".cpp", ".h"}]
    long = {}
    for path in [*(module.path for module in OWN + BENCHMARKS), *native]:
        lines = (ROOT / path).read_text().splitlines()
        most = NOUN_LINES_MAX if any(map(REASON.match, lines)) else FILE_LINES_MAX
        if len(lines) > most and not KERNELS & set(path.parts):
            long[str(path)] = len(lines)
    assert not long, "split them, or give the reason in a line that begins with `# size:`"


def test_functions_stay_short_or_say_why() -> None:
    long = {}
    for module in OWN + BENCHMARKS:
        if not KERNELS & set(module.path.parts):
            long |= {f"{module}: {name}": length for name, length in long_functions(module)}
    assert not long, "split them, or give the reason in a comment above: `# size:`"


def test_everything_is_caught_only_at_the_rpc_edge() -> None:
    inside = [module for module in OWN if not module.path.as_posix().startswith((*RPC_EDGE, CARRIED))]
    assert not [f"{module}:{line}" for module in inside for line in broad_excepts(module.tree)]


def test_nothing_from_outside_can_run_code() -> None:
    assert not {str(module): used for module in OWN if (used := unsafe(module.tree))}


def test_nothing_is_left_unfinished() -> None:
    places = [*PACKAGES, "proto", "tests", "benchmarks", "scripts"]
    files = [*ROOT.glob("*"), *(path for place in places for path in (ROOT / place).rglob("*"))]
    texts = [path for path in files if path.suffix in TEXT and path != Path(__file__)]
    assert not [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]


def long_functions(module: Module) -> Iterator[tuple[str, int]]:
    lines = module.text.splitlines()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            head = lines[node.lineno - 2 : node.body[0].lineno]
            if length > FUNCTION_LINES_MAX and not any(map(REASON.search, head)):
                yield node.name, length


def broad_excepts(tree: ast.Module) -> Iterator[int]:
    """The lines where every exception is caught or suppressed, and not raised again."""
    for node in ast.walk(tree):
        caught: set[str] = set()
        if isinstance(node, ast.ExceptHandler):
            again = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
            caught = set() if again else {ast.unparse(name) for name in _names(node.type)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = {ast.unparse(argument) for argument in node.args}
        if caught & EVERYTHING:
            yield node.lineno


def unsafe(tree: ast.Module) -> set[str]:
    """Names in a module that unpickle or evaluate what they are given."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            used |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)} & (UNSAFE_MODULES | UNSAFE_CALLS)
        elif isinstance(node, ast.Call):
            used |= {ast.unparse(node.func)} & UNSAFE_CALLS
            used |= {str(keyword.arg) for keyword in node.keywords} & UNSAFE_ARGUMENTS
    return used


def _names(node: ast.expr | None) -> list[ast.expr]:
    """What an `except` names; a bare one names everything."""
    if node is None:
        return [ast.Name("BaseException")]
    return node.elts if isinstance(node, ast.Tuple) else [node]
