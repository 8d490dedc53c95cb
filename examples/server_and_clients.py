"""A server, a client that stores a context, and another one in a process of its own that finds it.

Run it: python examples/server_and_clients.py; it wants pip install 'kvdb[server]'.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np

import kvdb

SPEC = kvdb.ModelSpec("random-model", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="float32")
DOCUMENT = list(range(1_000))


@contextmanager
def server() -> Iterator[str]:
    """`kvdb serve` on a free port of this machine; its address. The first line that it prints says that clients may come."""
    command = [sys.executable, "-m", "kvdb", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()  # it drains: calls under way are answered first


def write(address: str) -> None:
    random = np.random.default_rng(0)
    shape = (2, SPEC.kv_heads, len(DOCUMENT), SPEC.head_dim)
    with kvdb.connect(address) as db:
        kv = (random.standard_normal(shape, np.float32) for _ in range(SPEC.layers))
        db.import_context(SPEC, DOCUMENT, kv, name="contract.pdf", ttl=3600, metadata={"from": "the first client"})


def read(address: str) -> None:
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((heads, 1, SPEC.head_dim), np.float32) for heads in (8, 2, 2))
    with kvdb.connect(address) as db, db.create_session(SPEC, [*DOCUMENT, 42]) as session:
        print(f"the second client finds {session.reused} tokens, of {db.get('contract.pdf').info.metadata}")
        print("attention, over shared memory where both stand on one machine:", session.attend(0, q, k, v).shape)


def main() -> None:
    with server() as address:
        write(address)
        other = get_context("spawn").Process(target=read, args=(address,))
        other.start()
        other.join()
        assert other.exitcode == 0


if __name__ == "__main__":
    main()
