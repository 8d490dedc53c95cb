"""What does the disk cost: an import that is durable, a context that comes back, and decoding over more than fits into memory?

    python -m benchmarks.storage [--tokens 65536] [--layers 16] [--folder DIR] [--rounds 5]

The yardstick is the disk itself, in the same run and in turns: a file of as many bytes, written and read past the page cache in
pieces of the same size, as many at a time. Beside it stands a plain file of the same arrays, saved by safetensors, synced, and
loaded when the page cache holds none of it. Before anything is timed, as much memory as it takes is written to and given back: a
virtual machine may have returned free memory to its host, and gets it again more slowly than the disk reads.

Decoding is measured on 32 query heads over 8 KV heads of 128 in bfloat16: over a context that is in memory as a whole, and over
the same one in a database whose budget is a quarter of it, of which the index takes a part. In `anew` each step asks for
something else with all heads, which no decode does; in `decode` a quarter of the heads do, and the others go on asking the same.
Of SmolLM2-135M over 15,000 tokens a fifth of the pages that a step finds are none of the last eight steps'.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from statistics import median
from tempfile import mkdtemp
from time import perf_counter

import numpy as np
from safetensors.numpy import load_file, save_file

import kvdb
import kvdb.storage.direct_io as direct_io
from benchmarks.harness import huge_pages, machine, report
from benchmarks.workloads import Shape, Workload, generate
from indexes.arena import Arena
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.storage.direct_io import DEPTH
from kvdb.storage.segment_head import PIECE_BYTES

Pairs = list[tuple[np.ndarray, np.ndarray]]
KIND = "coarse-clusters"
"""The index takes 3 % of the bytes of keys and values; that of `flat` takes 31 %, more than there is."""
DIPR = kvdb.QueryOptions(kvdb.Dipr(), hints=kvdb.Hints(index=KIND))
WAYS = {
    "exact": (kvdb.QueryOptions(kvdb.Exact()), 1),
    "dipr anew": (DIPR, 1),
    "dipr decode": (DIPR, 4),
}
"""Options, and for how many steps a head asks the same."""
SHARE = 4
"""The budget of the small database is one part in so many of the context."""
WARM_UP = 2


def main() -> None:
    given = arguments()
    folder = Path(mkdtemp(prefix="kvdb-storage-", dir=given.folder))
    try:
        report("machine", **machine(), depth=DEPTH, piece_bytes=PIECE_BYTES)
        workload = generate("sharp", Shape(given.tokens), cache=given.cache)
        layers = [(np.ascontiguousarray(workload.k), np.ascontiguousarray(workload.v))] * given.layers
        spec = kvdb.ModelSpec("storage", given.layers, len(workload.queries), 8, 128, "bfloat16")
        if given.decode_only:
            with connected(folder / "store") as db:
                db.import_context(spec, np.arange(given.tokens), layers, name="doc")
        else:
            moved(folder, spec, layers, given.rounds)
        decoded(folder, spec, layers, workload, given.rounds)
    finally:
        rmtree(folder)


def moved(folder: Path, spec: kvdb.ModelSpec, layers: Pairs, rounds: int) -> None:
    """A line for an import and one for a cold read, each beside the raw disk in turns. The last round's store stays."""
    ids, nbytes = np.arange(layers[0][0].shape[1]), sum(k.nbytes + v.nbytes for k, v in layers)
    memory = huge_pages(nbytes // spec.layers)
    memory[:] = layers[0][0].view(np.uint8).ravel()[0]  # every page is there before anything is timed
    ways = ("raw write", "import", "safetensors save", "raw read", "cold read", "safetensors load")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        rmtree(folder / "store", ignore_errors=True)
        seconds["raw write"].append(timed(partial(raw, folder / "raw", memory, nbytes, write=True)))
        with connected(folder / "store") as db:
            touch(nbytes)
            seconds["import"].append(timed(partial(db.import_context, spec, ids, layers, name="doc")))
        seconds["raw read"].append(timed(partial(raw, folder / "raw", memory, nbytes, write=False)))
        (folder / "raw").unlink()
        with connected(folder / "store") as db:
            touch(nbytes)
            seconds["cold read"].append(timed(partial(last_layer, db, spec, ids)))
        touch(2 * nbytes)
        seconds["safetensors save"].append(timed(partial(save, folder / "plain", layers)))
        touch(2 * nbytes)
        seconds["safetensors load"].append(timed(partial(load_file, folder / "plain")))
        (folder / "plain").unlink()
    for way, yardstick in zip(ways, ("raw write",) * 3 + ("raw read",) * 3, strict=True):
        share = median(theirs / ours for ours, theirs in zip(seconds[way], seconds[yardstick], strict=True))
        rates = {"gb_s": nbytes / median(seconds[way]) / 1e9, "raw_gb_s": nbytes / median(seconds[yardstick]) / 1e9}
        report("storage", way=way, nbytes=nbytes, **rates, share_of_raw=share)


def decoded(folder: Path, spec: kvdb.ModelSpec, layers: Pairs, workload: Workload, rounds: int) -> None:
    """A line for each way of answering: a step of all layers with a quarter of the memory, beside one with all of it."""
    ids, nbytes = np.arange(layers[0][0].shape[1]), sum(k.nbytes + v.nbytes for k, v in layers)
    copytree(folder / "store", folder / "store-small")
    with connected(folder / "store") as whole, connected(folder / "store-small", nbytes // SHARE) as small:
        databases = {"whole": whole, "small": small}
        for db in databases.values():
            db.build_index("doc", KIND)
        for way, (options, alike) in WAYS.items():
            sessions = {name: db.create_session(spec, ids) for name, db in databases.items()}
            seconds: dict[str, list[float]] = {name: [] for name in sessions}
            for number in range(alike * (WARM_UP + rounds)):
                q = asked(workload, number, alike).astype(spec.numpy_dtype)
                for name, session in sessions.items():
                    spent = timed(partial(step, session, layers, q, options))
                    if number >= alike * WARM_UP:
                        seconds[name].append(spent / spec.layers)
            for session in sessions.values():
                session.close()
            ratio = median(small / whole for small, whole in zip(seconds["small"], seconds["whole"], strict=True))
            layer_ms = {f"{name}_layer_ms": 1e3 * median(spent) for name, spent in seconds.items()}
            report("storage", way=way, kind=KIND, tokens=len(ids), budget_share=1 / SHARE, **layer_ms, of_whole=ratio)


def asked(workload: Workload, number: int, alike: int) -> np.ndarray:
    """`[q_heads, 1, head_dim]`: the queries of a step, each head's the same for `alike` steps; as many heads change at each."""
    heads = np.arange(len(workload.queries))
    return workload.queries[heads, (number + heads) // alike % workload.queries.shape[1]][:, None]


def step(session: kvdb.Session, layers: Pairs, q: np.ndarray, options: kvdb.QueryOptions) -> None:
    """A decode step: one token in every layer."""
    for number, (k, v) in enumerate(layers):
        session.attend(number, q, k[:, :1], v[:, :1], options=options)


def last_layer(db: Client, spec: kvdb.ModelSpec, ids: np.ndarray) -> None:
    """Wait until all layers are in memory: they come in their order."""
    with db.create_session(spec, ids) as session:
        session.attention(spec.layers - 1, np.ones((spec.q_heads, 1, spec.head_dim), spec.numpy_dtype), retrieval=kvdb.Exact())


def raw(path: Path, memory: np.ndarray, nbytes: int, *, write: bool) -> None:
    """Write or read a file of `nbytes` bytes, DEPTH pieces at a time, from memory that is used again and again."""
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    with direct_io.open_file(path, flags, direct=True) as file, ThreadPoolExecutor(DEPTH) as executor:
        if write:
            direct_io.reserve(file, nbytes)

        def move(at: int) -> None:
            size = min(PIECE_BYTES, nbytes - at)
            begin = at % (len(memory) - PIECE_BYTES + 1) // direct_io.PAGE * direct_io.PAGE
            address = np.array([memory[begin:].ctypes.data], np.uint64)
            (direct_io.write if write else direct_io.read)(file, at, address, size)

        list(executor.map(move, range(0, nbytes, PIECE_BYTES)))
        if write:
            direct_io.sync(file)


def save(path: Path, layers: Pairs) -> None:
    """A plain file of all keys and values, which has reached the disk and lies in no cache."""
    bits = {
        f"{name}{layer}": array.view(np.uint16)
        for layer, pair in enumerate(layers)
        for name, array in zip("kv", pair, strict=True)
    }
    save_file(bits, path)
    with direct_io.open_file(path, os.O_RDWR, direct=False) as file:
        direct_io.sync(file)


def touch(nbytes: int) -> None:
    """Write to so much memory that is free, and give it back."""
    arena = Arena(nbytes)
    ctypes.memset(arena.address, 1, nbytes)
    arena.close()


def timed(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


def connected(folder: Path, cpu_bytes_max: int | None = None) -> Client:
    """A client of a store."""
    indexes = IndexConfig(automatic=False, on_demand="")
    return kvdb.connect(config=Config(storage=StorageConfig(path=str(folder), cpu_bytes_max=cpu_bytes_max), indexes=indexes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-only", action="store_true", help="import once, and measure no transfers")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--cache", type=Path, help="keeps the generated keys and values")
    return parser.parse_args()


if __name__ == "__main__":
    main()
