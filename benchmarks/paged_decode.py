"""Decode steps over a context of which a part fits into memory, beside all of it: a part of `benchmarks.storage`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from statistics import mean, median
from time import perf_counter

import numpy as np
import numpy.typing as npt

import kvdb
import kvdb._native as _native
import kvdb.storage.direct_io as direct_io
from benchmarks.harness import report
from benchmarks.reuse import WINDOWS, course
from benchmarks.workloads import Workload
from indexes.arena import Arena
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, StorageConfig

Pairs = list[tuple[np.ndarray, np.ndarray]]
KIND = "coarse-clusters"
"""The index takes 3 % of the bytes of keys and values; that of `flat` takes 31 %, more than there is."""
DIPR = kvdb.QueryOptions(kvdb.Dipr(), hints=kvdb.Hints(index=KIND))
SHARE = 4
"""The budget of the small database is one part in so many of the context."""
READS = 20_000
"""Random pages that are read for the disk's rate."""
PAGES_READ = re.compile(r"Pages Read: ([\d,]+) in ([\d,]+) batches")


@dataclass(frozen=True)
class Way:
    """queries: `[q_heads, steps]`, which of its queries each head asks at each step. warm_up: steps that are not measured."""

    name: str
    options: kvdb.QueryOptions
    queries: npt.NDArray[np.int64]
    warm_up: int


def ways(heads: int, queries: int, rounds: int) -> Iterator[Way]:
    """In `anew` each head asks something else at each step, in `alike` a quarter of the heads do, and in `measured` each comes
    back to what it asked as often as a real model's heads do (`benchmarks.reuse`)."""
    number = np.arange(heads)[:, None]
    rng = np.random.default_rng(0)
    few, more, most = np.arange(2 + rounds), np.arange(4 * (2 + rounds)), WINDOWS[-1] + 8 * rounds
    yield Way("exact", kvdb.QueryOptions(kvdb.Exact()), (number + few) % queries, 2)
    yield Way("dipr anew", DIPR, (number + few) % queries, 2)
    yield Way("dipr alike", DIPR, (number + more) // 4 % queries, 8)
    yield Way("dipr measured", DIPR, np.stack([course(rng, queries, most) for _ in range(heads)]), WINDOWS[-1])


def decoded(folder: Path, spec: kvdb.ModelSpec, layers: Pairs, workload: Workload, rounds: int) -> None:
    """A line for the disk, and one for each way of answering: a step of all layers with a quarter of the memory, beside one with
    all of it. pages_ms: what the disk takes for the pages that were read, however many it has to do at once."""
    ids, nbytes = np.arange(layers[0][0].shape[1]), sum(k.nbytes + v.nbytes for k, v in layers)
    rate = random_pages(max((folder / "store").rglob("*"), key=lambda path: path.stat().st_size))
    report("storage", way="random pages", pages_s=rate)
    copytree(folder / "store", folder / "store-small")
    with connected(folder / "store") as whole, connected(folder / "store-small", nbytes // SHARE) as small:
        for db in (whole, small):
            db.build_index("doc", KIND)
        for way in ways(len(workload.queries), workload.queries.shape[1], rounds):
            seconds, reads = steps_of(way, spec, [db.create_session(spec, ids) for db in (whole, small)], layers, workload)
            pages, batches = (mean(part) / spec.layers for part in zip(*reads, strict=True)) if reads else (0, 0)
            report(
                "storage",
                way=way.name,
                kind=KIND,
                tokens=len(ids),
                budget_share=1 / SHARE,
                whole_layer_ms=1e3 * median(seconds[:, 0]) / spec.layers,
                small_layer_ms=1e3 * median(seconds[:, 1]) / spec.layers,
                of_whole=median(seconds[:, 1] / seconds[:, 0]),
                layer_pages=pages,
                layer_batches=batches,
                pages_ms=1e3 * pages / rate,
            )


def steps_of(
    way: Way, spec: kvdb.ModelSpec, sessions: list[kvdb.Session], layers: Pairs, workload: Workload
) -> tuple[npt.NDArray[np.float64], list[tuple[int, int]]]:
    """The seconds of each step and session, and the pages and batches of each step of the last session, which ends them."""
    seconds, reads = [], []
    for number, asked in enumerate(way.queries.T):
        q = workload.queries[np.arange(len(asked)), asked][:, None].astype(spec.numpy_dtype)
        spent = [timed(partial(step, session, layers, q, way.options)) for session in sessions]
        if number >= way.warm_up:
            seconds.append(spent)
            reads += last_reads(sessions[-1], way.options)
    for session in sessions:
        session.close()
    return np.array(seconds), reads


def step(session: kvdb.Session, layers: Pairs, q: np.ndarray, options: kvdb.QueryOptions) -> None:
    """A decode step: one token in every layer."""
    for number, (k, v) in enumerate(layers):
        session.attend(number, q, k[:, :1], v[:, :1], options=options)


def last_reads(session: kvdb.Session, options: kvdb.QueryOptions) -> list[tuple[int, int]]:
    """The pages and batches that the last search of all layers read; nothing where there was none."""
    plans = [str(session.explain(layer, options=options)) for layer in range(session.spec.layers)]
    found = [match.groups() for plan in plans if (match := PAGES_READ.search(plan))]
    counts = [(int(pages.replace(",", "")), int(batches.replace(",", ""))) for pages, batches in found]
    return [(sum(pages for pages, _ in counts), sum(batches for _, batches in counts))] if counts else []


def random_pages(path: Path) -> float:
    """Random pages of a file that the disk gives a second, as many at a time as a search asks for at most."""
    rng = np.random.default_rng(0)
    offsets = rng.integers(0, path.stat().st_size // direct_io.PAGE, READS).astype(np.uint64) * np.uint64(direct_io.PAGE)
    arena = Arena(READS * direct_io.PAGE)
    addresses = np.uint64(arena.address) + np.arange(READS, dtype=np.uint64) * np.uint64(direct_io.PAGE)
    with direct_io.open_file(path, os.O_RDONLY, direct=True) as file:
        spent = [timed(partial(_native.read_pages, file, offsets, addresses)) for _ in range(4)]
    arena.close()
    return READS / median(spent[1:])  # the first one finds memory too


def timed(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


def connected(folder: Path, cpu_bytes_max: int | None = None) -> Client:
    """A client of a store."""
    indexes = IndexConfig(automatic=False, on_demand="")
    return kvdb.connect(config=Config(storage=StorageConfig(path=str(folder), cpu_bytes_max=cpu_bytes_max), indexes=indexes))
