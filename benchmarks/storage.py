"""What does the disk cost: an import that is durable, a context that comes back, and decoding over more than fits into memory?

    python -m benchmarks.storage [--tokens 65536] [--layers 16] [--folder DIR] [--rounds 5]

The yardstick is the disk itself, in the same run and in turns: a file of as many bytes, written and read past the page cache in
pieces of the same size, as many at a time. Beside it stands a plain file of the same arrays, saved by safetensors, synced, and
loaded when the page cache holds none of it; and LMCache's disk backend, where it is installed. Before anything is timed, as
much memory as it takes is written to and given back: a virtual machine may have returned free memory to its host, and gets it
again more slowly than the disk reads.

Decoding is measured on 32 query heads over 8 KV heads of 128 in bfloat16: over a context that is in memory as a whole, and over
the same one in a database whose budget is a quarter of it, of which the index takes a part (`benchmarks.paged_decode`). In
`anew` each step asks for something else with all heads, which no decode does; in `alike` a quarter of the heads do; in `measured`
heads come back to what they asked as often as those of SmolLM2-135M (`benchmarks.reuse`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import mkdtemp

import numpy as np
from safetensors.numpy import load_file, save_file

import kvdb
import kvdb.storage.direct_io as direct_io
from benchmarks import lmcache_disk
from benchmarks.harness import argument_parser, huge_pages, machine, report
from benchmarks.paged_decode import Pairs, connected, decoded, timed
from benchmarks.workloads import Shape, generate
from indexes.arena import Arena
from kvdb.client.client import Client
from kvdb.storage.direct_io import DEPTH
from kvdb.storage.segment_head import PIECE_BYTES

QUERIES = 64
"""Query samples of each head."""


def main() -> None:
    given = arguments()
    folder = Path(mkdtemp(prefix="kvdb-storage-", dir=given.folder))
    try:
        report("machine", **machine(), depth=DEPTH, piece_bytes=PIECE_BYTES)
        workload = generate("sharp", Shape(given.tokens), QUERIES, query_samples=1, cache=given.cache)
        layers = [(np.ascontiguousarray(workload.k), np.ascontiguousarray(workload.v))] * given.layers
        spec = kvdb.ModelSpec("storage", given.layers, len(workload.queries), 8, 128, "bfloat16")
        if given.decode_only:
            with connected(folder / "store") as db:
                db.import_context(spec, np.arange(given.tokens), layers, name="doc")
        else:
            moved(folder, spec, layers, given.rounds)
        if not given.transfers_only:
            decoded(folder, spec, layers, workload, given.rounds)
    finally:
        rmtree(folder)


def moved(folder: Path, spec: kvdb.ModelSpec, layers: Pairs, rounds: int) -> None:
    """A line for an import and one for a cold read, each beside the raw disk in turns. The last round's store stays."""
    ids, nbytes = np.arange(layers[0][0].shape[1]), sum(k.nbytes + v.nbytes for k, v in layers)
    memory = huge_pages(nbytes // spec.layers)
    memory[:] = layers[0][0].view(np.uint8).ravel()[0]  # every page is there before anything is timed
    written, read = (
        ("raw write", "import", "safetensors save", "lmcache save"),
        ("raw read", "cold read", "safetensors load", "lmcache load"),
    )
    ways = written + read
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
        with suppress(lmcache_disk.NotInstalled), lmcache_disk.opened(folder / "lmcache", layers) as backend:
            touch(2 * nbytes)  # for the page cache, through which it writes and reads
            seconds["lmcache save"].append(timed(backend.save))
            seconds["lmcache load"].append(timed(backend.load))
            assert backend.holds(0)
        rmtree(folder / "lmcache", ignore_errors=True)
    for way in ways:
        if not seconds[way]:
            report("storage", way=way, skipped="LMCache's disk backend cannot be imported here")
            continue
        yardstick = "raw write" if way in written else "raw read"
        share = median(theirs / ours for ours, theirs in zip(seconds[way], seconds[yardstick], strict=True))
        rates = {"gb_s": nbytes / median(seconds[way]) / 1e9, "raw_gb_s": nbytes / median(seconds[yardstick]) / 1e9}
        report("storage", way=way, nbytes=nbytes, **rates, share_of_raw=share)


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


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-only", action="store_true", help="import once, and measure no transfers")
    parser.add_argument("--transfers-only", action="store_true", help="measure no decoding")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--cache", type=Path, help="keeps the generated keys and values")
    return parser.parse_args()


if __name__ == "__main__":
    main()
