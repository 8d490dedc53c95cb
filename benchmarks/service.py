"""What does the service cost beside the engine? One JSON line a measurement.

`service.decode`: one attend of one token over a `Decode` stream on loopback, against the attention kernel's own time in the same
query embedded; and through gRPC's public API, against which the SDK drives its streams from the caller's thread.
`service.unary`: short calls that are each a gRPC call of their own, and a step of two sessions.
`service.import`: import_context through gRPC on loopback TCP into a process of its own, against the same import embedded.
`service.read`: the same context read back, all layers in one call into arrays used before, beside its import.

No indexes are built, because that would take the processor from what is measured.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from tempfile import NamedTemporaryFile
from time import perf_counter
from unittest.mock import patch

import numpy as np

import kvdb
from benchmarks.harness import machine, report
from kvdb.config import Config, IndexConfig
from kvdb.types import Array

SPEC = kvdb.ModelSpec("bench", layers=1, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
DEEP = kvdb.ModelSpec("bench-deep", layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
CONTEXTS = (256, 4096, 32_768)
CALLS, ROUNDS, WARM_UP = 100, 15, 200
IMPORT_TOKENS, IMPORT_ROUNDS, IMPORT_ARRAYS = 8192, 5, 4

NO_BUILDS = IndexConfig(on_demand="", automatic=False)
NO_BUILDS_TOML = '[indexes]\non_demand = ""\nautomatic = false\n'
OVERHEAD_US_MAX = 400
IMPORT_GB_PER_S_MIN = 1.0
PUBLIC = patch("kvdb.client.remote.session_stream.available", lambda _: False)


def main() -> None:
    report("machine", **machine())
    with server() as target, kvdb.connect(target) as remote, kvdb.connect(config=Config(indexes=NO_BUILDS)) as embedded:
        for tokens in CONTEXTS:
            decode(remote, embedded, tokens)
        unary(remote)
        imports_and_reads(remote, embedded)


@contextmanager
def server() -> Iterator[str]:
    """A server process on a free port; its target."""
    with NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(NO_BUILDS_TOML)
        config.flush()
        command = [sys.executable, "-m", "kvdb.__main__", "serve", "--port", "0", "--config", config.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split()[-1]
            finally:
                process.terminate()


def decode(remote: kvdb.Client, embedded: kvdb.Client, tokens: int) -> None:
    """The ways take turns, so that what else the machine does falls on all alike."""
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    step = (random(SPEC.q_heads, 1), k[:, :1], v[:, :1])
    us: dict[str, list[float]] = {"remote": [], "public": [], "embedded": [], "kernel": [], "server_kernel": []}
    with ExitStack() as stack:
        for db in (remote, embedded):
            context = db.import_context(SPEC, ids, [(k, v)], name=f"decode-{tokens}")
            stack.callback(context.drop)
        sessions = {
            name: stack.enter_context((embedded if name == "embedded" else remote).create_session(SPEC, ids))
            for name in ("remote", "public", "embedded")
        }
        with PUBLIC:
            timed(sessions["public"], step, WARM_UP)
        for name in ("remote", "embedded"):
            timed(sessions[name], step, WARM_UP)
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                totals, kernels = timed(session, step, CALLS, kernel=name == "embedded")
                us[name] += totals
                us["kernel"] += kernels
            us["server_kernel"] += timed(sessions["remote"], step, CALLS // 4, kernel=True)[1]
    report(
        "service.decode",
        context_tokens=tokens,
        remote_p50_us=median(us["remote"]),
        remote_p99_us=quantiles(us["remote"], n=100)[-1],
        public_api_p50_us=median(us["public"]),
        embedded_p50_us=median(us["embedded"]),
        kernel_p50_us=median(us["kernel"]),
        server_kernel_p50_us=median(us["server_kernel"]),
        beyond_embedded_kernel_us=median(us["remote"]) - median(us["kernel"]),
        beyond_server_kernel_us=median(us["remote"]) - median(us["server_kernel"]),
        target_us_max=OVERHEAD_US_MAX,
    )


def unary(remote: kvdb.Client) -> None:
    """The calls take turns. The step is one token each of two sessions over the same document."""
    tokens = CONTEXTS[0]
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    q = random(SPEC.q_heads, 1)
    step = [np.stack([array, array]) for array in (q, k[:, :1], v[:, :1])]
    with ExitStack() as stack:
        stack.callback(remote.import_context(SPEC, ids, [(k, v)], name="unary").drop)
        idle, *two = [stack.enter_context(remote.create_session(SPEC, ids)) for _ in range(3)]
        calls: dict[str, Callable[[], object]] = {
            "contexts": remote.contexts,
            "stats": idle.stats,
            "step_of_two": lambda: remote.attend(two, 0, *step),
        }
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


def imports_and_reads(remote: kvdb.Client, embedded: kvdb.Client) -> None:
    """GB of KV a second over some rounds, each context dropped before the next; the first goes into memory never used before."""
    layers = [keys_values(IMPORT_TOKENS, seed) for seed in range(IMPORT_ARRAYS)]
    nbytes = IMPORT_TOKENS * DEEP.token_nbytes * DEEP.layers
    ids = np.arange(IMPORT_TOKENS, dtype=np.int32)
    rates: dict[str, list[float]] = {"remote": [], "embedded": []}
    reads: dict[str, list[float]] = {"remote": [], "embedded": []}
    out = [keys_values(IMPORT_TOKENS)] * DEEP.layers
    for name, db in (("remote", remote), ("embedded", embedded)) * (1 + IMPORT_ROUNDS):
        started = perf_counter()
        context = db.import_context(DEEP, ids, (layers[i % IMPORT_ARRAYS] for i in range(DEEP.layers)), name="import")
        rates[name].append(nbytes / (perf_counter() - started) / 1e9)
        started = perf_counter()
        context.read(range(DEEP.layers), out=out)
        reads[name].append(nbytes / (perf_counter() - started) / 1e9)
        context.drop()
    warm = {name: values[1:] for name, values in rates.items()}
    report(
        "service.import",
        nbytes=nbytes,
        remote_gb_per_s=median(warm["remote"]),
        remote_first_gb_per_s=rates["remote"][0],
        remote_best_gb_per_s=max(warm["remote"]),
        embedded_gb_per_s=median(warm["embedded"]),
        embedded_first_gb_per_s=rates["embedded"][0],
        target_gb_per_s_min=IMPORT_GB_PER_S_MIN,
    )
    of_import = [read / imported for read, imported in zip(reads["remote"], rates["remote"], strict=True)][1:]
    report(
        "service.read",
        nbytes=nbytes,
        remote_gb_per_s=median(reads["remote"][1:]),
        remote_best_gb_per_s=max(reads["remote"][1:]),
        remote_of_import=median(of_import),
        embedded_gb_per_s=median(reads["embedded"][1:]),
        target_of_import_min=1.0,
    )


def keys_values(tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """k and v, `[kv_heads, tokens, head_dim]`."""
    return random(SPEC.kv_heads, tokens, seed), random(SPEC.kv_heads, tokens, seed + 1000)


def random(heads: int, tokens: int, seed: int = 0) -> Array:
    values = np.random.default_rng(seed).standard_normal((heads, tokens, SPEC.head_dim), np.float32)
    return values.astype(SPEC.numpy_dtype)


if __name__ == "__main__":
    main()
