"""Servers in processes of their own, for benchmarks: `kvdb serve`, and one that answers every message with bytes of zeros."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import grpc

NO_BUILDS_TOML = '[indexes]\non_demand = ""\nautomatic = false\n[log]\nlevel = "warning"\n'
"""No indexes are built, because that would take the processor from what is measured."""
ECHO = "/kvdb.benchmarks.Echo/Stream"
THREADS = 8


class Running(NamedTuple):
    """A process. said: the first line that it printed."""

    said: str
    pid: int


@contextmanager
def server(local_socket: str = "auto", flags: Sequence[str] = ()) -> Iterator[str]:
    """`kvdb serve` on a free port; its target. local_socket: as the setting. flags: more of the command's."""
    with served(local_socket, flags) as running:
        yield running.said


@contextmanager
def served(local_socket: str = "auto", flags: Sequence[str] = ()) -> Iterator[Running]:
    """`server`, with its process; `said` is the target."""
    with NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(NO_BUILDS_TOML)
        config.flush()
        given = ["--port", "0", "--config", config.name, "--server.local-socket", local_socket, *flags]
        with process(["kvdb.__main__", "serve", *given]) as running:
            yield running._replace(said=running.said.split()[-1])


@contextmanager
def echo(reply_nbytes: int) -> Iterator[str]:
    """A bare gRPC server whose stream answers each message with so many bytes; its target."""
    with process(["benchmarks.service_process", str(reply_nbytes)]) as running:
        yield running.said


@contextmanager
def process(module: Sequence[str]) -> Iterator[Running]:
    """A process of this interpreter that runs a module, until the body ends."""
    with subprocess.Popen([sys.executable, "-m", *module], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield Running(running.stdout.readline().strip(), running.pid)
        finally:
            running.terminate()


def main() -> None:
    """Echo until the process ends."""
    reply = bytes(int(sys.argv[1]))

    def answers(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in requests:
            yield reply

    running = grpc.server(ThreadPoolExecutor(THREADS))
    service, method = ECHO.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(answers)})
    running.add_generic_rpc_handlers((handler,))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    print(f"kvdb://127.0.0.1:{port}", flush=True)
    running.wait_for_termination()


if __name__ == "__main__":
    main()
