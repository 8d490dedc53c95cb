"""What `pip install` brings: four packages, the compiled kernels, the wire contract, the demo's words, the console's
files, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from engine_adapter.models import vault
from kvdb.errors import Unsupported
from tests.architecture.source import PACKAGES, ROOT

MODELS = "engine_adapter/models/"
CONSOLE = "kvdb/server/console/static/"
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r".*(\.pyi?|/py\.typed)$").match


def build(project: Path, out: Path) -> Path:
    """A wheel of a project. The kernels of kvdb come from the build tree of the editable install, so that it takes seconds."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--wheel-dir",
        out,
        project,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the demo's models."""
    return build(ROOT / MODELS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    name = next(name for name in names if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(ZipFile(wheel).read(name).decode())


def test_it_holds_four_packages(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


def test_it_holds_every_module_of_the_tree(names: set[str]) -> None:
    tree = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*")}
    assert set(filter(PYTHON, names)) == set(filter(PYTHON, tree))


def test_it_holds_the_kernels_the_wire_contract_the_demos_words_the_console_and_nothing_else(
    names: set[str], wheel: Path
) -> None:
    rest = {name for name in names if ".dist-info/" not in name and not PYTHON(name)}
    words = {name for name in rest if name.startswith(MODELS)}
    assert words == {path.relative_to(ROOT).as_posix() for path in (ROOT / MODELS).glob("*.txt")}
    contract = "kvdb/rpc/kvdb.proto"
    assert ZipFile(wheel).read(contract) == (ROOT / "proto" / contract).read_bytes()
    console = {name for name in rest if name.startswith(CONSOLE)}
    assert console == {path.relative_to(ROOT).as_posix() for path in (ROOT / CONSOLE).iterdir()}
    kernels = {name.partition(".")[0] for name in rest - words - console - {contract}}
    assert kernels == {"kvdb/_native", "indexes/_native", "indexes/libkvdb_base"}


def test_the_demos_models_are_a_distribution_of_their_own(models: Path, metadata: Message) -> None:
    names = {name for name in ZipFile(models).namelist() if ".dist-info/" not in name}
    assert names == {path.relative_to(ROOT).as_posix() for path in (ROOT / MODELS).glob("*/*") if "__pycache__" not in path.parts}
    demo = [requirement for requirement in metadata.get_all("Requires-Dist") or [] if 'extra == "demo"' in requirement]
    assert any(requirement.startswith(f"kvdb-demo-models=={models.name.split('-')[1]};") for requirement in demo)
    assert models.name.split("-")[1] == metadata["Version"]


def test_without_them_the_demo_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"pip install 'kvdb\[demo\]'"):
        vault.load_from(tmp_path / "vault-2m")


def test_its_description_has_no_links_into_the_repository(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# kvdb")
    assert {link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_its_packages_are_typed(package: str, names: set[str]) -> None:
    assert f"{package}/py.typed" in names


def test_the_base_install_is_small(metadata: Message) -> None:
    wanted = metadata.get_all("Requires-Dist") or []
    base = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted if "extra ==" not in requirement}
    assert base == {"numpy", "ml-dtypes", "grpcio", "protobuf", "shtab", "typed-settings"}
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "server",
        "aio",
        "tracing",
        "transformers",
        "demo",
        "hnsw",
        "gpu",
        "plots",
        "bench",
        "rag",
        "rag-adapters",
        "dev",
    }


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """Where the wheel is installed."""
    folder = tmp_path / "site-packages"
    ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The packages' sources without anything compiled."""
    folder = tmp_path / "clone"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "vault-*"))
    return folder


def run_python(folder: Path, *arguments: str, installed: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with what is installed there and its dependencies, not the editable install of this tree."""
    path = os.pathsep.join([*([str(installed)] if installed else []), sysconfig.get_path("platlib")])
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)


def test_it_works_without_the_source_tree(installed: Path) -> None:
    script = f"import kvdb, engine_adapter; assert kvdb.__file__.startswith({str(installed)!r}); kvdb.connect().close()"
    done = run_python(installed, "-c", script, installed=installed)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [("-m", "kvdb", "--version"), ("-c", "import kvdb._native")])
def test_in_a_clone_that_hides_it_python_says_which_of_the_two_was_imported_and_what_to_do(
    arguments: tuple[str, ...], installed: Path, clone: Path
) -> None:
    done = run_python(clone, *arguments, installed=installed)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert f"not compiled in {clone}, " in said
    assert f"installed in {installed}:" in said
    assert "another folder" in said
    assert done.returncode == 1


def test_what_it_says_to_do_in_a_clone_works(installed: Path, clone: Path, tmp_path: Path) -> None:
    for folder, arguments in ((tmp_path, ()), (clone, ("-P",))):
        done = run_python(folder, *arguments, "-m", "kvdb", "--version", installed=installed)
        assert done.returncode == 0, done.stderr


def test_in_a_clone_where_nothing_is_installed_python_says_how_to_install_it(clone: Path) -> None:
    done = run_python(clone, "-m", "kvdb", "--version")
    assert f"not compiled for Python {sysconfig.get_python_version()} in {clone}: pip install --editable {clone}" in done.stderr


def test_no_clone_hides_an_editable_install(clone: Path) -> None:
    command = [sys.executable, "-m", "kvdb", "--version"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_documents_install_in_place_where_python_runs_among_the_sources() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    blocks = [block for path in documents for block in FENCED.findall(path.read_text())]
    installing = [
        block
        for block in blocks
        if re.search(r"pip install [^\n]*'?\.\[", block) and re.search(r"python\S* -(c|m (?!venv))", block)
    ]
    assert installing
    assert all("--editable '.[" in block for block in installing)
