"""A store as commands take it."""

from contextlib import contextmanager

from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from tests.stores import config


@contextmanager
def offered(folder, by):
    """What --server takes for a store: by "store" its folder, by "server" the address of a server that has it open."""
    if by == "store":
        yield str(folder)
        return
    with Database(config(path=str(folder))) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        yield server.target
        server.stop(grace=0)
