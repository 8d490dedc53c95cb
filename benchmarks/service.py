"""What does the service cost beside the engine? One JSON line a measurement.

Each server is a process of its own on this host; one shares memory with its clients, one does so and leaves a processor to them
(`cpu.threads`), one answers over gRPC alone.
`service.echo`: an empty request through shared memory, as `kvdb ping` makes it, and as many bytes as an attend has over a bare
gRPC stream, by the same client code as the SDK's.
`service.decode`: one attend of one token through shared memory, over a `Decode` stream on loopback, through gRPC's public API,
against which the SDK drives its streams from the caller's thread, and embedded. What it takes beyond its kernel is said call by
call: the engine that answers measures its kernel in the same call. The ways take turns of 500 tokens, of which the first 100 are
not counted, as a turn begins with caches that hold another way's; at its end the tokens are taken back.
`service.unary`: short calls that are each a gRPC call of their own, and a step of two sessions by both ways.
`service.import`: import_context by both ways into the other process, against the same import embedded.
`service.read`: the same context read back, all layers in one call into arrays used before, beside its import.

No indexes are built, because that would take the processor from what is measured.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import grpc
import numpy as np

import kvdb
import kvdb._native as _native
import kvdb.client.remote.direct as direct
from benchmarks.harness import argument_parser, machine, report
from benchmarks.service_process import ECHO, echo, server
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.pings import pings
from kvdb.config import Config, IndexConfig
from kvdb.rpc.options import client_options
from kvdb.session.state import SessionState
from kvdb.types import Array

SPEC = kvdb.ModelSpec("bench", layers=1, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
DEEP = kvdb.ModelSpec("bench-deep", layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
CONTEXTS = (256, 4096, 32_768)
CALLS, ROUNDS, WARM_UP = 400, 6, 100
IMPORT_TOKENS, IMPORT_ROUNDS, IMPORT_ARRAYS = 8192, 5, 4

NO_BUILDS = IndexConfig(on_demand="", automatic=False)
PINGS = 5000
BEYOND_KERNEL_US_MAX = {"shared": (25, 100), "shared, spare": (25, 100), "grpc": (350, None)}
IMPORT_GB_PER_S_MIN = 5.0
PUBLIC = patch("kvdb.client.remote.session_stream.available", lambda _: False)


def main() -> None:
    argument_parser(__doc__).parse_args()
    report("machine", **machine())
    spare = ["--threads", str(max(1, _native.usable_cpus() - 1))]
    with (
        server() as sharing,
        server(flags=spare) as sparing,
        server("") as alone,
        kvdb.connect(sharing) as shared,
        kvdb.connect(sparing) as spared,
        kvdb.connect(alone) as remote,
        kvdb.connect(config=Config(indexes=NO_BUILDS)) as embedded,
    ):
        echoes(sharing)
        for tokens in CONTEXTS:
            decode({"shared": shared, "shared, spare": spared, "grpc": remote, "public": remote, "embedded": embedded}, tokens)
        unary(shared, remote)
        imports_and_reads({"shared": shared, "grpc": remote, "embedded": embedded})


def echoes(target: str) -> None:
    """The transports without kvdb behind them."""
    reply = SPEC.q_heads * SPEC.head_dim * SPEC.numpy_dtype.itemsize
    request = bytes(reply + SPEC.token_nbytes)
    with ExitStack() as stack:
        connection = Connection(target, "", kvdb.Timeouts(), kvdb.Tls())
        stack.callback(connection.close)
        us = {"shared memory": [seconds * 1e6 for seconds in pings(connection, PINGS)["shared memory"]], "gRPC stream": []}
        address = stack.enter_context(echo(reply)).removeprefix("kvdb://")
        channel = stack.enter_context(grpc.insecure_channel(address, options=client_options()))
        stack.enter_context(patch("kvdb.client.remote.direct.DECODE", ECHO))
        stack.enter_context(patch.object(direct, "pb", SimpleNamespace(DecodeReply=SimpleNamespace(FromString=bytes))))
        bare = SimpleNamespace(channel=channel, metadata=(), direct=True, target=address)
        call = direct.DirectDecode(cast("Connection", bare))
        stack.callback(call.cancel)
        for _ in range(PINGS):
            started = perf_counter()
            call.exchange(request)
            us["gRPC stream"].append((perf_counter() - started) * 1e6)
    for way, times in us.items():
        report("service.echo", way=way, count=len(times), p50_us=median(times), p99_us=quantiles(times, n=100)[-1])


def decode(ways: dict[str, kvdb.Client], tokens: int) -> None:
    """The ways take turns, so that what else the machine does falls on all alike."""
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    step = (random(SPEC.q_heads, 1), k[:, :1], v[:, :1])
    us: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with ExitStack() as stack:
        for db in set(ways.values()):
            stack.callback(db.import_context(SPEC, ids, [(k, v)], name=f"decode-{tokens}").drop)
        sessions = {name: stack.enter_context(db.create_session(SPEC, ids)) for name, db in ways.items()}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                with PUBLIC if name == "public" else nullcontext():
                    us[name] += timed(ways[name], session, step, WARM_UP + CALLS)[WARM_UP:]
                session.truncate(tokens)
    for name, times in us.items():
        totals, kernels = zip(*times, strict=True)
        beyond = [total - kernel for total, kernel in times]
        p50_max, p99_max = BEYOND_KERNEL_US_MAX.get(name, (None, None))
        report(
            "service.decode",
            way=name,
            context_tokens=tokens,
            p50_us=median(totals),
            p99_us=quantiles(totals, n=100)[-1],
            kernel_p50_us=median(kernels),
            p50_beyond_kernel_us=median(beyond),
            p99_beyond_kernel_us=quantiles(beyond, n=100)[-1],
            p50_beyond_kernel_us_max=p50_max,
            p99_beyond_kernel_us_max=p99_max,
        )


def unary(shared: kvdb.Client, remote: kvdb.Client) -> None:
    """The calls take turns. The step is one token each of two sessions over the same document."""
    tokens = CONTEXTS[0]
    k, v = keys_values(tokens)
    ids = np.arange(tokens, dtype=np.int32)
    q = random(SPEC.q_heads, 1)
    step = [np.stack([array, array]) for array in (q, k[:, :1], v[:, :1])]
    calls: dict[str, Callable[[], object]] = {"contexts": remote.contexts}
    with ExitStack() as stack:
        for name, db in (("shared", shared), ("grpc", remote)):
            stack.callback(db.import_context(SPEC, ids, [(k, v)], name="unary").drop)
            two = [stack.enter_context(db.create_session(SPEC, ids)) for _ in range(2)]
            calls[f"stats_{name}"] = two[0].stats
            calls[f"step_of_two_{name}"] = partial(db.attend, two, 0, *step)
        us: dict[str, list[float]] = {name: [] for name in calls}
        for count in (WARM_UP, *[CALLS // 4] * ROUNDS):
            for name, call in calls.items():
                for _ in range(count):
                    started = perf_counter()
                    call()
                    us[name].append((perf_counter() - started) * 1e6)
    report("service.unary", context_tokens=tokens, **{f"{name}_p50_us": median(times[WARM_UP:]) for name, times in us.items()})


def timed(db: kvdb.Client, session: kvdb.Session, step: tuple[Array, Array, Array], calls: int) -> list[tuple[float, float]]:
    """Microseconds of each attend, and of the kernel in it."""
    times = []
    own = session._transport
    for _ in range(calls):
        started = perf_counter()
        session.attend(0, *step)
        total = perf_counter() - started
        kernel = own.last_kernel(0)[0] if isinstance(own, SessionState) else db.last_timings.kernel  # type: ignore[union-attr]
        times.append((total * 1e6, kernel * 1e6))
    return times


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
