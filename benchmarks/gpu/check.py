"""Are the kernels right on this machine's card? Their tests, compiled for it, every question at small sizes, and both of some
under compute-sanitizer, where it is on the PATH.

    python -m benchmarks.gpu.check

A plain checkout does, with torch, Triton, pytest and hypothesis. Without a card it says so and ends well.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.supervise import supervise

TESTS = "tests/kvdb/attention/triton"
SANITIZED = ("bandwidth", "formats", "shared", "dipr")
"""Questions without other libraries' kernels, which are not ours to look into."""
SECONDS_MAX = 540.0
"""For everything together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["tests"], help="the kernels' tests alone (default everything)")
    if parser.parse_args().what == "tests":
        sys.exit(tests())
    if not card_found():
        print(
            "gpu-check: torch finds no card, so there is nothing to check; make test runs the kernels under Triton's interpreter"
        )
        return
    started, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for what, (command, environment) in steps(Path(folder) / "lines.jsonl").items():
            print(f"== gpu-check: {what}", flush=True)
            outcome = supervise(command, SECONDS_MAX - (time.monotonic() - started), environment)
            print(f"== gpu-check: {what}: {outcome.status} {outcome.error}".rstrip(), flush=True)
            failed += [what] if outcome.status != "done" else []
    sys.exit(f"gpu-check: failed: {', '.join(failed)}" if failed else 0)


def card_found() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # takes seconds, and is not everywhere

    return torch.cuda.is_available()


def steps(lines: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands, and what their environment has beside this one."""
    python, module, compiled = [sys.executable, "-m"], "benchmarks.gpu", {"TRITON_INTERPRET": "0"}
    questions = [*python, module, "--small", "--json", str(lines)]
    made = {"the kernels' tests": ([*python, f"{module}.check", "tests"], compiled), "every question": (questions, compiled)}
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("gpu-check: compute-sanitizer is not on the PATH, and is left out")
        return made
    # Without torch's own allocator, since a tensor's neighbour would hide what is read beyond its end.
    alone = compiled | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watched = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1", *questions]
    return made | {f"compute-sanitizer, {name}": ([*watched, "--section", name], alone) for name in SANITIZED}


def tests() -> int:
    """The kernels' tests in this process, also where kvdb is not compiled."""
    from benchmarks.gpu import checkout  # before anything imports kvdb

    checkout.prepare()
    import pytest

    return int(pytest.main([TESTS]))


if __name__ == "__main__":
    main()
