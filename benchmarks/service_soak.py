"""Does a server stay as it is, however long it is used? One JSON line at the end; exit status 1 where it does not.

    python -m benchmarks.service_soak [--seconds 1800] [--workers 4] [--seed 0]

Two tenants import contexts, decode over them through shared memory and over gRPC, fork, truncate, leave sessions to expire and
drop what they stored; now and then a client is killed in the middle of it. Answers are compared with attention in numpy. The
server's resident memory is looked at each second: `slope` is the median of the slopes between all pairs of these (Theil, Sen)
behind the first quarter, as a share of the memory in ten minutes. In the end everything was dropped, and descriptors, threads and
sessions are counted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from benchmarks.service_process import served
from kvdb.errors import SessionClosed, Unavailable
from kvdb.server.tenancy.tokens_file import new_token
from kvdb.types import Array

SPEC = kvdb.ModelSpec("soak", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="float32")
TENANTS = ("one", "other")
TOKENS_MAX, STEPS_MAX = 1500, 40
IDLE_SECONDS = 5.0
"""After which sessions expire; less in a soak that is shorter."""
KILL_SECONDS = 5.0
"""How often a client is killed."""
SLOPE_MAX, TELLING_SECONDS = 0.01, 300.0
"""The largest growth of the resident memory in ten minutes, as a share; a shorter soak says nothing of it."""
ERROR_MAX = 1e-4
POINTS_MAX = 400
"""The most points of the resident memory that are looked at, for the slopes are those of all pairs of them."""
DOOMED = """
import sys
from benchmarks.service_soak import use
use(*sys.argv[1:3], seconds=1e9, seed=int(sys.argv[3]))
"""


class Used(NamedTuple):
    """What a worker did. error: the largest of an answer, relative to attention in numpy. expired: the rounds that ended because
    this machine did not come to them for `IDLE_SECONDS`."""

    rounds: int = 0
    steps: int = 0
    error: float = 0.0
    expired: int = 0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report("machine", **machine())
    return 0 if soak(given.seconds, given.workers, given.seed) else 1


def soak(seconds: float, workers: int, seed: int) -> bool:
    """Use a server for so long; whether it stayed as it was."""
    with ExitStack() as stack:
        tokens_file = Path(stack.enter_context(TemporaryDirectory())) / "tokens.json"
        tokens = [new_token(tokens_file, tenant) for tenant in TENANTS]
        admin = new_token(tokens_file, "operator", admin=True)
        idle = min(IDLE_SECONDS, max(1.0, seconds))
        flags = ["--server.tokens-file", str(tokens_file), "--server.session-idle-seconds", str(idle)]
        target, pid = stack.enter_context(served(flags=flags))
        use(target, tokens[0], 0.0, seed)  # what a server makes once
        before = counted(pid)
        done = Event()
        with ThreadPoolExecutor(workers + 2) as threads:
            memory = threads.submit(watched, pid, done)
            killed = threads.submit(kill_clients, target, tokens, seconds)
            used = [threads.submit(use, target, tokens[n % 2], seconds, seed + n) for n in range(workers)]
            try:
                all_used = [one.result() for one in used]
            finally:
                done.set()
        left = settled(target, admin, pid, before)
        slope = slope_of(memory.result())
        error = max(one.error for one in all_used)
        flat = slope <= SLOPE_MAX or seconds < TELLING_SECONDS
        right = flat and error <= ERROR_MAX and not left
        report(
            "service.soak",
            seconds=seconds,
            rounds=sum(one.rounds for one in all_used),
            steps=sum(one.steps for one in all_used),
            expired=sum(one.expired for one in all_used),
            clients_killed=killed.result(),
            error=error,
            resident_mib=[round(nbytes / 2**20, 1) for _, nbytes in eighths(memory.result())],
            slope=slope,
            slope_max=SLOPE_MAX,
            opened=counted(pid)._asdict(),
            before=before._asdict(),
            left=left,
            right=right,
        )
        return right


def use(target: str, token: str, seconds: float, seed: int) -> Used:
    """Use the server at least once, and for so long, as one client does."""
    rng = np.random.default_rng(seed)
    end, used = monotonic() + seconds, Used()
    while True:
        with kvdb.connect(target, token=token) as db:
            if rng.integers(2):
                db._transport._connection.lanes.close()  # type: ignore[attr-defined]  # over gRPC alone
            for _ in range(8):
                try:
                    steps, error = one_round(db, rng, f"{seed}-{used.rounds}-{os.getpid()}")
                    used = Used(used.rounds + 1, used.steps + steps, max(used.error, error), used.expired)
                except (SessionClosed, Unavailable):
                    used = used._replace(rounds=used.rounds + 1, expired=used.expired + 1)
                    forget(db, os.getpid(), f"{seed}-{used.rounds - 1}-")
                if monotonic() >= end:
                    return used


def one_round(db: kvdb.Client, rng: np.random.Generator, name: str) -> tuple[int, float]:
    """Store a context, decode over it, and drop it. How many tokens were decoded, and the error of the last answer."""
    stored, steps = int(rng.integers(1, TOKENS_MAX)), int(rng.integers(1, STEPS_MAX))
    ids = rng.integers(0, 1 << 30, stored)
    layers = [(normal(rng, 2, stored), normal(rng, 2, stored)) for _ in range(SPEC.layers)]
    context = db.import_context(SPEC, ids, layers, name=name)
    session = db.create_session(SPEC, ids)
    k, v = layers[0]
    for _ in range(steps):
        q, own_k, own_v = normal(rng, 8, 1), normal(rng, 2, 1), normal(rng, 2, 1)
        out = session.attend(0, q, own_k, own_v, retrieval=kvdb.Exact())
        k, v = np.concatenate([k, own_k], 1), np.concatenate([v, own_v], 1)
    error = float(np.linalg.norm(out - attention(q, k, v)) / np.linalg.norm(out))
    if rng.integers(2):
        with session.fork() as twin:
            twin.truncate(stored)
            twin.update(1, normal(rng, 2, 3), normal(rng, 2, 3))
    if rng.integers(4):
        session.close()  # otherwise it expires
    context.drop()
    return steps, error


def attention(q: Array, k: Array, v: Array) -> Array:
    """Attention of one token, `[q_heads, 1, head_dim]`, over all."""
    shared = len(q) // len(k)
    scores = np.einsum("hd,htd->ht", q[:, 0], np.repeat(k, shared, 0)) / np.sqrt(SPEC.head_dim)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    out: Array = np.einsum("ht,htd->hd", weights, np.repeat(v, shared, 0))[:, None]
    return out


def normal(rng: np.random.Generator, heads: int, tokens: int) -> Array:
    return rng.standard_normal((heads, tokens, SPEC.head_dim), np.float32)


def kill_clients(target: str, tokens: list[str], seconds: float) -> int:
    """Kill a client in the middle of its work, again and again; how many."""
    end, number = monotonic() + seconds, 0
    while monotonic() + KILL_SECONDS < end:
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, target, tokens[number % 2], str(10_000 + number)])
        sleep(KILL_SECONDS)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        with kvdb.connect(target, token=tokens[number % 2]) as db:
            forget(db, doomed.pid)
        number += 1
    return number


def forget(db: kvdb.Client, pid: int, begin: str = "") -> None:
    """Drop what a process stored and will not drop itself."""
    for context in db.contexts():
        if context.name.startswith(begin) and context.name.endswith(f"-{pid}"):
            context.drop()


def watched(pid: int, done: Event) -> list[tuple[float, int]]:
    """The server's resident bytes, each second."""
    began, seen = monotonic(), []
    while True:
        seen.append((monotonic() - began, resident(pid)))
        if done.wait(1.0):
            return seen


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def eighths(seen: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """What was seen at the end of each eighth."""
    return [seen[len(seen) * (n + 1) // 8 - 1] for n in range(8)]


def slope_of(seen: list[tuple[float, int]]) -> float:
    """The growth of memory in ten minutes, as a share of it; 0 where there is too little to tell."""
    later = seen[len(seen) // 4 :]
    points = later[:: max(1, len(later) // POINTS_MAX)]
    slopes = [(y - x) / (b - a) for (a, x), (b, y) in combinations(points, 2)]
    return 600 * median(slopes) / median(y for _, y in points) if slopes else 0.0


class Counted(NamedTuple):
    """What a process has open."""

    descriptors: int
    threads: int


def counted(pid: int) -> Counted:
    return Counted(*(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task")))


def settled(target: str, admin: str, pid: int, before: Counted) -> str:
    """Drop what killed clients left, and wait until sessions have expired; what is left then, "" for nothing."""
    with kvdb.connect(target, token=admin) as db:
        for _ in range(30):
            for context in db.contexts():
                context.drop()
            now = counted(pid)
            held = sum(tier.blocks_used * tier.block_nbytes for tier in db.tiers())
            more = [now.descriptors - before.descriptors - SPARE_DESCRIPTORS, now.threads - before.threads - SPARE_THREADS]
            if not held and max(more) <= 0:
                return ""
            sleep(1.0)
        return f"{held:,} bytes, {more[0]} descriptors, {more[1]} threads"


SPARE_DESCRIPTORS, SPARE_THREADS = 12, 40
"""What the client that asks takes, and threads of pools that come with the first work of a kind."""


if __name__ == "__main__":
    sys.exit(main())
