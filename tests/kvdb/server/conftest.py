"""A real server on a free port of 127.0.0.1, in this process or in one of its own."""

import subprocess
import sys
from contextlib import contextmanager

import grpc
import pytest

import kvdb
from kvdb.config import ServerConfig
from kvdb.rpc.calls import Stub
from kvdb.server.serve import Server
from tests.waiting import until

SECONDS_MAX = 10.0


@pytest.fixture
def serve(engine):
    """`serve(**settings)` starts a server over the test's engine and returns it; it is stopped at the end. It shares no memory
    unless it is told to, so that everything goes over gRPC."""
    servers = []

    def start(**settings):
        server = Server(engine, ServerConfig(**{"port": 0, "local_socket": "", **settings}))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop(grace=0)


@pytest.fixture
def target(serve):
    return serve().target


@pytest.fixture
def client(target):
    with kvdb.connect(target) as opened:
        yield opened


@pytest.fixture
def channel(target):
    """gRPC without the SDK."""
    with grpc.insecure_channel(target.removeprefix("kvdb://")) as opened:
        yield opened


@pytest.fixture
def stub(channel):
    return Stub(channel)


@pytest.fixture
def stub_of():
    """`stub_of(server)`: gRPC without the SDK, a connection of its own."""
    channels = []

    def connect(server):
        channels.append(grpc.insecure_channel(server.target.removeprefix("kvdb://"), [("grpc.use_local_subchannel_pool", 1)]))
        return Stub(channels[-1])

    yield connect
    for channel in channels:
        channel.close()


@pytest.fixture
def blocks_used(engine):
    """`blocks_used()` counts the blocks that hold anything."""
    return lambda: sum(tier.blocks_used for tier in engine.tiers())


@pytest.fixture
def eventually():
    """`eventually(condition)` waits until it holds: a server does some things only after a call has ended."""
    return until


@pytest.fixture
def process():
    """`with process(*arguments) as (running, line)`: a `kvdb serve` of its own, and the line it printed when ready."""

    @contextmanager
    def start(*arguments):
        command = [sys.executable, "-m", "kvdb.__main__", "serve", "--port", "0", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            try:
                yield running, running.stdout.readline().strip()
            finally:
                running.kill()

    return start
