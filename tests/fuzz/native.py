"""Fuzz the native boundary: make the calls that real use makes, then make them again with arguments that are wrong.

    python -m tests.fuzz.native DIRECTORY [--package indexes | kvdb] [--seconds 30] [--seed 0]

DIRECTORY holds `indexes/_native*.so` and `kvdb/_native*.so`, built with the sanitizers (`make fuzz` does all of it). Whatever
arguments a call is given, it may refuse them with a ValueError or TypeError or answer; it may not touch memory that is not its
own, which the address sanitizer sees, nor do what the language leaves undefined. Block addresses alone are trusted, so blocks
are given as they are.
"""

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz import attention
from tests.fuzz.recorder import Recorder, entries
from tests.fuzz.values import mutated
from tests.indexes.accelerator import Plain

REFUSALS = (ValueError, TypeError, OverflowError, MemoryError, OSError)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
USES_MAX = 60  # in which everything public must have been called
MAPS = Path("/proc/self/maps")
BASE = "libkvdb_base"


def load(directory: Path, package: str) -> Recorder:
    """Put the module of that directory in the place of the installed one, behind a recorder."""
    (path,) = directory.glob(f"{package}/_native*.so")
    spec = importlib.util.spec_from_file_location(f"{package}._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorder = Recorder(module)
    if package == "indexes":
        import indexes

        sys.modules["indexes._native"] = indexes._native = recorder  # type: ignore[assignment,attr-defined]
    return recorder


def check_base(directory: Path) -> None:
    """Fail unless the shared library under the modules is that of the directory.

    The installed one has the same SONAME, and whichever a process loads first serves all modules: with the installed one first,
    the sanitizers would see nothing of what is in it.
    """
    if not MAPS.exists():  # not Linux
        return
    mapped = {line.split(maxsplit=5)[5] for line in MAPS.read_text().splitlines() if BASE in line}
    expected = directory.resolve() / "indexes"
    if not mapped or any(Path(path).parent != expected for path in mapped):
        raise SystemExit(f"the modules stand on {', '.join(sorted(mapped)) or 'no ' + BASE}; expected the one in {expected}")


def use(rng: np.random.Generator, kind: str) -> list[Any]:
    """Use one index of a kind over random keys as a caller would, with extreme values.

    Returns the blocks: what they hold must live as long as calls with their addresses are made.
    """
    from indexes.base import Queries
    from indexes.blocks import Blocks
    from indexes.retrieval import Dipr, Exact, TopK, TopP
    from indexes.searcher import searcher_of

    kv_heads, group, n = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    head_dim, tokens = 8 * int(rng.integers(1, 33)), int(rng.choice([0, 1, 2, 17, 63, 64, 65, 200, 700]))
    k = (rng.standard_normal((kv_heads, tokens, head_dim)) * 10.0 ** rng.integers(-6, 4)).astype(rng.choice(DTYPES))
    k[rng.random(k.shape[:2]) < rng.choice([0, 0.5, 1])] = 0
    k = np.nan_to_num(k.astype(np.float32), posinf=1, neginf=-1).astype(k.dtype)
    size, value_dim = int(rng.choice([1, 16, 64])), 8 * int(rng.integers(1, head_dim // 8 + 1))
    shorter = kind != "quantized" and bool(rng.random() < 0.5)
    in_keys = shorter and bool(rng.random() < 0.5)

    def stored(k: Any) -> Blocks:
        if in_keys:
            return Blocks.of(k, block_size=size, value_dim=value_dim)
        return Blocks.of(k, k[..., :value_dim] if shorter else k, size)

    blocks = stored(k)
    query_samples = rng.standard_normal((kv_heads * group, 8, head_dim)).astype(np.float32)
    index = built(kind, blocks, query_samples if rng.random() < 0.5 else None, Plain() if rng.random() < 0.5 else None)
    q = rng.standard_normal((kv_heads * group, n, head_dim)).astype(np.float32) * 10.0 ** rng.integers(-6, 4)
    hidden = rng.integers(0, 1 << 63, -(-tokens // 64) + 1, dtype=np.uint64) if rng.random() < 0.5 else None
    active = rng.random(kv_heads) < 0.5 if rng.random() < 0.5 else None
    queries = replace(Queries.of(q, kv_heads, float(head_dim) ** -0.5, tokens, hidden), active_heads=active)
    for retrieval in (Exact(), Dipr(float(rng.random()) or 1), TopK(int(rng.integers(1, 900))), TopP(float(rng.random()) or 1)):
        index.search(queries, retrieval, estimate_tail=bool(rng.random() < 0.5), tight=bool(rng.random() < 0.5))
        searcher_of(index, retrieval, queries.scale, estimate_tail=index.estimates_tail and bool(rng.random() < 0.5))
    more = np.concatenate([k, k[:, : int(rng.integers(0, tokens + 1))]], axis=1)
    grown = stored(more)
    index.insert(grown)
    index.verify()
    grown.values(kv_heads - 1)
    with TemporaryDirectory() as directory:
        spoiled(rng, kind, index, Path(directory) / "index")
    return [blocks, grown]


def built(kind: str, blocks: Any, query_samples: Any, accelerator: Plain | None) -> Any:
    """Take all steps of a build."""
    import indexes.registry as registry

    steps = registry.build_steps(kind, blocks, query_samples, accelerator)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def spoiled(rng: np.random.Generator, kind: str, index: Any, path: Path) -> None:
    """Load a file with wrong bytes: it is refused, or is an index that can be searched."""
    import indexes.registry as registry

    index.save(path)
    registry.load(kind, path, index.blocks)
    data = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
    path.write_bytes(bytes(data[: int(rng.integers(len(data) + 1))] if rng.random() < 0.5 else data))
    with suppress(ValueError):
        registry.load(kind, path, index.blocks).verify()


def answered(rng: random.Random, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Make a call with one or two arguments changed. Returns whether it was not refused."""
    slots: dict[int | str, Any] = {**dict(enumerate(args)), **named}
    for slot in rng.sample(list(slots), min(len(slots), rng.choice([1, 1, 2]))):
        slots[slot] = mutated(rng, slots[slot])
    changed, named = [slots[i] for i in range(len(args))], {name: slots[name] for name in named}
    try:
        function(*changed, **named)
    except REFUSALS:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--package", choices=["indexes", "kvdb"], default="indexes")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of index to use (default all)")
    given = parser.parse_args()
    np.seterr(all="ignore")  # wrong numbers are what this is about
    if given.package == "kvdb" and "indexes._native" not in sys.modules:
        load(given.directory, "indexes")  # whose searchers it calls
    recorder = load(given.directory, given.package)
    check_base(given.directory)
    from indexes.registry import KINDS

    made = refused = uses = 0
    kinds, expected = given.kinds or list(KINDS), entries(recorder.module)
    end = time.monotonic() + given.seconds
    while time.monotonic() < end or (uses < USES_MAX and not expected <= recorder.entered):
        rng, choice = np.random.default_rng([given.seed, uses]), random.Random(given.seed << 32 | uses)
        isas = [*recorder.isas(), *recorder.emulated_isas()]
        recorder.set_isa(isas[uses // len(kinds) % len(isas)])
        recorder.calls.clear()
        alive = use(rng, kinds[uses % len(kinds)]) if given.package == "indexes" else attention.use(rng, recorder)
        uses += 1
        with recorder.quiet():
            for _ in range(200):
                made += 1
                refused += not answered(choice, *choice.choice(recorder.calls))
        del alive
    check_base(given.directory)
    sys.stdout.write(f"{given.package} used {uses} times, {made} calls with wrong arguments, {refused} of them refused\n")
    missing = sorted(expected - recorder.entered)
    if missing:
        sys.stderr.write(f"never called, as the fuzzer has no entry for it: {', '.join(missing)}\n")
    return 0 if made > refused > 0 and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
