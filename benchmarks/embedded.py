"""What does the engine cost beside its kernels, in process? One JSON line a measurement.

`embedded.attend`: one attend of one token; what it takes beyond the attention kernel, whose own time is taken within the call.
`embedded.cold`: the same on a short context, every second time after 128 MiB of something else were read through the caches.
`embedded.import`: import_context into memory that was used before, against a plain copy of the same bytes between such memory;
and into memory fresh from the system, against filling fresh memory, which is what the system gives at best.

No indexes are built, because that would take the processor from what is measured.
"""

from statistics import median
from time import perf_counter

import numpy as np

import kvdb
from benchmarks.harness import argument_parser, huge_pages, machine, measure, report
from kvdb import _native
from kvdb.config import Config, IndexConfig
from kvdb.storage.block_layout import BlockLayout
from kvdb.types import DTYPES, Array

OVERHEAD_US_MAX = 50
IMPORT_GB_PER_S_MIN = 5.0
LAYERS, TOKENS = 8, 16_384
CONTEXTS = (256, 4096, 32_768)
CALLS, WARM_UP = 1500, 200
NO_BUILDS = Config(indexes=IndexConfig(on_demand="", automatic=False))


def main() -> None:
    argument_parser(__doc__).parse_args()
    report("machine", **machine())
    for tokens in CONTEXTS:
        for kind in ("numpy", "torch"):
            attend(tokens, kind)
    for kind in ("numpy", "torch"):
        cold(kind)
    imports()


def attend(tokens: int, kind: str) -> None:
    spec = kvdb.ModelSpec("bench", 1, 32, 8, 128, "bfloat16")
    ids = np.arange(tokens)
    k, v = random(8, tokens), random(8, tokens)
    arrays = [as_kind(array, kind) for array in (random(32, 1), k[:, :1], v[:, :1])]
    totals, beyond = [], []
    with kvdb.connect(config=NO_BUILDS) as db:
        db.import_context(spec, ids, [(k, v)], name="doc")
        with db.create_session(spec, ids) as session:
            before = session.stats().kernel_seconds
            for call in range(WARM_UP + CALLS):
                started = perf_counter()
                session.attend(0, *arrays)
                seconds = perf_counter() - started
                after = session.stats().kernel_seconds
                if call >= WARM_UP:
                    totals.append(seconds)
                    beyond.append(seconds - (after - before))
                before = after
    report(
        "embedded.attend",
        context_tokens=tokens,
        arrays=kind,
        attend_us=median(totals) * 1e6,
        beyond_kernel_us=median(beyond) * 1e6,
        target_us_max=OVERHEAD_US_MAX,
    )


def cold(kind: str) -> None:
    spec = kvdb.ModelSpec("bench", 1, 32, 8, 128, "bfloat16")
    ids, k, v = np.arange(256), random(8, 256), random(8, 256)
    arrays = [as_kind(array, kind) for array in (random(32, 1), k[:, :1], v[:, :1])]
    other = huge_pages(128 << 20)
    other[:] = 1
    layout = BlockLayout.of(spec.shape(0), 64)
    table = np.arange(other.ctypes.data, other.ctypes.data + len(other), layout.nbytes, dtype=np.uint64)
    beyond: dict[str, list[float]] = {"warm": [], "cold": []}
    with kvdb.connect(config=NO_BUILDS) as db:
        db.import_context(spec, ids, [(k, v)], name="doc")
        with db.create_session(spec, ids) as session:
            before = session.stats().kernel_seconds
            for call in range(WARM_UP + CALLS):
                caches = "warm" if call % 2 else "cold"
                if caches == "cold":
                    _native.read_blocks(layout.native, table)
                started = perf_counter()
                session.attend(0, *arrays)
                seconds = perf_counter() - started
                after = session.stats().kernel_seconds
                if call >= WARM_UP:
                    beyond[caches].append(seconds - (after - before))
                before = after
    report("embedded.cold", arrays=kind, **{f"{name}_beyond_kernel_us": median(us) * 1e6 for name, us in beyond.items()})


def imports() -> None:
    spec = kvdb.ModelSpec("bench", LAYERS, 32, 8, 128, "bfloat16")
    ids = np.arange(TOKENS)
    layers = [(random(8, TOKENS), random(8, TOKENS)) for _ in range(LAYERS)]
    nbytes = TOKENS * spec.token_nbytes * LAYERS
    with kvdb.connect(config=NO_BUILDS) as db:

        def once() -> None:
            db.import_context(spec, ids, layers, name="doc").drop()

        started = perf_counter()
        once()
        fresh_import = perf_counter() - started
        source = np.ones(nbytes, np.uint8)
        fresh_fill = perf_counter() - started - fresh_import
        target = np.ones(nbytes, np.uint8)
        warm = measure({"import": once, "copy": lambda: np.copyto(target, source)}, rounds=9)
    report(
        "embedded.import",
        nbytes=nbytes,
        import_gb_per_s=nbytes / 1e9 / warm["import"],
        copy_gb_per_s=nbytes / 1e9 / warm["copy"],
        fresh_import_gb_per_s=nbytes / 1e9 / fresh_import,
        fresh_fill_gb_per_s=nbytes / 1e9 / fresh_fill,
        target_gb_per_s_min=IMPORT_GB_PER_S_MIN,
    )


def random(heads: int, tokens: int) -> Array:
    rng = np.random.default_rng(heads + tokens)
    return rng.standard_normal((heads, tokens, 128), np.float32).astype(DTYPES["bfloat16"])


def as_kind(array: Array, kind: str) -> object:
    if kind == "numpy":
        return array
    import torch  # the only place that needs it

    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


if __name__ == "__main__":
    main()
