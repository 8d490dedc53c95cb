"""What every command that asks a server about a context takes."""

import argparse

import kvdb.config as configuration
from kvdb.client.client import Client
from kvdb.client.connect import connect

SERVER = "kvdb://127.0.0.1:7700"


def add_context(parser: argparse.ArgumentParser) -> None:
    """The name of a context, and where it is."""
    parser.add_argument("name", metavar="NAME", help="the context's name")
    parser.add_argument("--server", default=SERVER, help=f"where it is stored (default {SERVER})")
    parser.add_argument("--token", help="what the server wants of its clients (default KVDB_TOKEN)")


def open_database(given: argparse.Namespace) -> Client:
    """The server that was named. Raises what `kvdb.connect` raises."""
    token = configuration.load().server.token if given.token is None else given.token
    return connect(given.server, token=token)
