"""Why compiled kernels were not found, and what to do: sources without them may hide an installed kvdb that has them."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def explanation(stub: str) -> str:
    """What to say of the kernels that should have been found in place of a Python file. stub: its path, in a package."""
    package = Path(stub).parent
    root = package.parent
    installed = [entry for entry in map(Path, sys.path) if entry != root and _has_kernels(entry / package.name)]
    if installed:
        return (
            f"the kernels of {package.name} are not compiled in {root}, whose sources come before the kvdb that is installed in "
            f"{installed[0]}: start Python in another folder, or with python -P (or PYTHONSAFEPATH=1), and keep {root} out of "
            "PYTHONPATH"
        )
    python = ".".join(map(str, sys.version_info[:2]))
    return f"the kernels of {package.name} are not compiled for Python {python} in {root}: pip install --editable {root}"


def _has_kernels(package: Path) -> bool:
    """Whether a folder is a whole package; beside the sources of an editable install stand compiled modules alone."""
    return (package / "__init__.py").is_file() and any((package / f"_native{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
