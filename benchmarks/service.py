"""What does the service cost beside the engine? One JSON line a measurement.

Each server is a process of its own on this host; one shares memory with its clients, the other answers over gRPC alone.
`service.ping`: an empty request by each way, as `kvdb ping` makes it.
`service.decode`: one attend of one token through shared memory, over a `Decode` stream on loopback, through gRPC's public API,
against which the SDK drives its streams from the caller's thread, and embedded; beside the attention kernel's own time, as the
engine that answers measures it.
`service.unary`: short calls that are each a gRPC call of their own, and a step of two sessions by both ways.
`service.import`: import_context by both ways into the other process, against the same import embedded.
`service.read`: the same context read back, all layers in one call into arrays used before, beside its import.

No indexes are built, because that would take the processor from what is measured.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median, quantiles
from tempfile import NamedTemporaryFile
from time import perf_counter
from unittest.mock import patch

import numpy as np

import kvdb
from benchmarks.harness import machine, report
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.pings import pings
from kvdb.config import Config, IndexConfig
from kvdb.types import Array

SPEC = kvdb.ModelSpec("bench", layers=1, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
DEEP = kvdb.ModelSpec("bench-deep", layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
CONTEXTS = (256, 4096, 32_768)
CALLS, ROUNDS, WARM_UP = 100, 15, 200
IMPORT_TOKENS, IMPORT_ROUNDS, IMPORT_ARRAYS = 8192, 5, 4

NO_BUILDS = IndexConfig(on_demand="", automatic=False)
NO_BUILDS_TOML = '[indexes]\non_demand = ""\nautomatic = false\n'
PINGS = 5000
BEYOND_KERNEL_US_MAX = {"shared": 25, "grpc": 350}
IMPORT_GB_PER_S_MIN = 5.0
PUBLIC = patch("kvdb.client.remote.session_stream.available", lambda _: False)


def main() -> None:
    report("machine", **machine())
    with (
        server("auto") as sharing,
        server("") as alone,
        kvdb.connect(sharing) as shared,
        kvdb.connect(alone) as grpc,
        kvdb.connect(config=Config(indexes=NO_BUILDS)) as embedded,
    ):
        ping(sharing)
        for tokens in CONTEXTS:
            decode({"shared": shared, "grpc": grpc, "public": grpc, "embedded": embedded}, tokens)
        unary(shared, grpc)
        imports_and_reads({"shared": shared, "grpc": grpc, "embedded": embedded})


@contextmanager
def server(local_socket: str) -> Iterator[str]:
    """A server process on a free port; its target. local_socket: as the setting."""
    with NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(NO_BUILDS_TOML)
        config.flush()
        flags = ["--port", "0", "--config", config.name, "--server.local-socket", local_socket]
        command = [sys.executable, "-m", "kvdb.__main__", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split()[-1]
            finally:
                process.terminate()


def ping(target: str) -> None:
    connection = Connection(target, "", kvdb.Timeouts(), kvdb.Tls())
    try:
        for way, seconds in pings(connection, PINGS).items():
            p50, p99 = median(seconds), quantiles(seconds, n=100)[-1]
            report("service.ping", way=way, count=PINGS, p50_us=p50 * 1e6, p99_us=p99 * 1e6)
    finally:
        connection.close()


def decode(ways: dict[str, kvdb.Client], tokens: int) -> None:
    """The ways take turns, so that what else the machine does falls on all alike."""
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    step = (random(SPEC.q_heads, 1), k[:, :1], v[:, :1])
    us: dict[str, list[float]] = {name: [] for name in ways}
    kernels: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        for db in set(ways.values()):
            stack.callback(db.import_context(SPEC, ids, [(k, v)], name=f"decode-{tokens}").drop)
        sessions = {name: stack.enter_context(db.create_session(SPEC, ids)) for name, db in ways.items()}
        for name, session in sessions.items():
            with PUBLIC if name == "public" else nullcontext():
                timed(session, step, WARM_UP)
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                us[name] += timed(session, step, CALLS)[0]
                kernels[name] += timed(session, step, CALLS // 4, kernel=True)[1]
    for name, times in us.items():
        p50, p99, kernel = median(times), quantiles(times, n=100)[-1], median(kernels[name])
        report(
            "service.decode",
            way=name,
            context_tokens=tokens,
            p50_us=p50,
            p99_us=p99,
            kernel_p50_us=kernel,
            p50_beyond_kernel_us=p50 - kernel,
            p99_beyond_kernel_us=p99 - kernel,
            p50_beyond_kernel_us_max=BEYOND_KERNEL_US_MAX.get(name),
        )


def unary(shared: kvdb.Client, grpc: kvdb.Client) -> None:
    """The calls take turns. The step is one token each of two sessions over the same document."""
    tokens = CONTEXTS[0]
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    q = random(SPEC.q_heads, 1)
    step = [np.stack([array, array]) for array in (q, k[:, :1], v[:, :1])]
    calls: dict[str, Callable[[], object]] = {"contexts": grpc.contexts}
    with ExitStack() as stack:
        for name, db in (("shared", shared), ("grpc", grpc)):
            stack.callback(db.import_context(SPEC, ids, [(k, v)], name="unary").drop)
            two = [stack.enter_context(db.create_session(SPEC, ids)) for _ in range(2)]
            calls[f"stats_{name}"] = two[0].stats
            calls[f"step_of_two_{name}"] = partial(db.attend, two, 0, *step)
        us: dict[str, list[float]] = {name: [] for name in calls}
        for count in (WARM_UP, *[CALLS] * ROUNDS):
            for name, call in calls.items():
                for _ in range(count):
                    started = perf_counter()
                    call()
                    us[name].append((perf_counter() - started) * 1e6)
    report("service.unary", context_tokens=tokens, **{f"{name}_p50_us": median(times[WARM_UP:]) for name, times in us.items()})


def timed(
    session: kvdb.Session, step: tuple[Array, Array, Array], calls: int, kernel: bool = False
) -> tuple[list[float], list[float]]:
    """Microseconds of each attend and, if asked for, of its kernel."""
    totals, kernels = [], []
    for _ in range(calls):
        before = session.stats().kernel_seconds if kernel else 0.0
        started = perf_counter()
        session.attend(0, *step)
        totals.append((perf_counter() - started) * 1e6)
        if kernel:
            kernels.append((session.stats().kernel_seconds - before) * 1e6)
    return totals, kernels


def imports_and_reads(ways: dict[str, kvdb.Client]) -> None:
    """GB of KV a second over some rounds, each context dropped before the next; the first goes into memory never used before."""
    layers = [keys_values(IMPORT_TOKENS, seed) for seed in range(IMPORT_ARRAYS)]
    nbytes = IMPORT_TOKENS * DEEP.token_nbytes * DEEP.layers
    ids = np.arange(IMPORT_TOKENS, dtype=np.int32)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    reads: dict[str, list[float]] = {name: [] for name in ways}
    out = [keys_values(IMPORT_TOKENS)] * DEEP.layers
    for name, db in [*ways.items()] * (1 + IMPORT_ROUNDS):
        started = perf_counter()
        context = db.import_context(DEEP, ids, (layers[i % IMPORT_ARRAYS] for i in range(DEEP.layers)), name="import")
        rates[name].append(nbytes / (perf_counter() - started) / 1e9)
        started = perf_counter()
        context.read(range(DEEP.layers), out=out)
        reads[name].append(nbytes / (perf_counter() - started) / 1e9)
        context.drop()
    for name, (first, *warm) in rates.items():
        report(
            "service.import",
            way=name,
            nbytes=nbytes,
            gb_per_s=median(warm),
            first_gb_per_s=first,
            best_gb_per_s=max(warm),
            gb_per_s_min=IMPORT_GB_PER_S_MIN if name == "shared" else None,
        )
    for name, (_, *warm) in reads.items():
        of_import = median(read / imported for read, imported in zip(warm, rates[name][1:], strict=True))
        report("service.read", way=name, nbytes=nbytes, gb_per_s=median(warm), best_gb_per_s=max(warm), of_import=of_import)


def keys_values(tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """k and v, `[kv_heads, tokens, head_dim]`."""
    return random(SPEC.kv_heads, tokens, seed), random(SPEC.kv_heads, tokens, seed + 1000)


def random(heads: int, tokens: int, seed: int = 0) -> Array:
    values = np.random.default_rng(seed).standard_normal((heads, tokens, SPEC.head_dim), np.float32)
    return values.astype(SPEC.numpy_dtype)


if __name__ == "__main__":
    main()
