"""How soon is a store of a million blocks open again after its process was killed, with an import under way?

    python -m benchmarks.crash [--contexts 2000] [--tokens 2048] [--layers 16] [--rounds 5] [--folder DIR]

A process fills a store, begins one more import, of which it writes a layer, and is killed. The store is opened: the seconds until
sessions can be created, and until one over the last context is there. Each round opens a copy of what the kill left, the files of
segments by links. Blocks are as small as they can be, 64 tokens of one KV head of 8 in bfloat16, because opening reads none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.database import Database
from kvdb.types import Retention

BLOCK = 64


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--contexts", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the store is made (default: the folder of temporary files)")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fill is not None:
        fill(given)
    report("machine", **machine())
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        filled = subprocess.run(
            [sys.executable, "-m", "benchmarks.crash", *sys.argv[1:], "--fill", str(folder / "left")], check=False
        )
        assert filled.returncode == -signal.SIGKILL
        opened_again(folder, given)


def opened_again(folder: Path, given: argparse.Namespace) -> None:
    opened, matched = [], []
    for number in range(given.rounds):
        copy = folder / f"copy{number}"
        shutil.copytree(folder / "left", copy, copy_function=_link_segments)
        begin = time.perf_counter()
        with Database(config(copy)) as database:
            opened.append(time.perf_counter() - begin)
            session = database.create_session(spec(given), ids(given.contexts - 1, given.tokens))
            matched.append(time.perf_counter() - begin)
            assert session.reused == given.tokens
            session.close()
        shutil.rmtree(copy)
    blocks = given.contexts * given.layers * -(-given.tokens // BLOCK)
    seconds = {"opened_s": statistics.median(opened), "session_s": statistics.median(matched)}
    report("crash", blocks=blocks, contexts=given.contexts, tokens=given.tokens, layers=given.layers, **seconds)


def fill(given: argparse.Namespace) -> None:
    """Fill a store, and die with an import under way."""
    database, rng = Database(config(given.fill)), np.random.default_rng(0)
    k, v = (rng.standard_normal((1, given.tokens, 8), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    for number in range(given.contexts + 1):
        writing = database.begin_import(spec(given), ids(number, given.tokens), f"c{number}", retention=Retention("os"))
        for layer in range(given.layers if number < given.contexts else 1):
            writing.write(layer, k, v)
        if number < given.contexts:
            writing.commit()
    os.kill(os.getpid(), signal.SIGKILL)


def spec(given: argparse.Namespace) -> kvdb.ModelSpec:
    return kvdb.ModelSpec("crash", given.layers, 1, 1, 8, "bfloat16")


def config(folder: Path) -> Config:
    return Config(storage=StorageConfig(path=str(folder)), indexes=IndexConfig(on_demand="", automatic=False))


def ids(number: int, tokens: int) -> np.ndarray:
    """The tokens of a context, which begin with its number."""
    text = np.random.default_rng(number).integers(0, 150_000, tokens)
    text[0] = number
    return text.astype(np.int32)


def _link_segments(source: str, target: str) -> None:
    if source.endswith(".segment"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


if __name__ == "__main__":
    main()
