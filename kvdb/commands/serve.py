"""`kvdb serve`: offer a database over gRPC."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

import kvdb.config as configuration
from kvdb.commands.arguments import sentence
from kvdb.errors import Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Subparsers") -> None:
    """Add `serve` to the `kvdb` command."""
    what = "offer a database over gRPC"
    parser = commands.add_parser("serve", help=what, description=sentence(f"{what}, until SIGTERM"))
    parser.add_argument("--host", help="address to listen on, or unix:/path (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default 7700)")
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="port for health and metrics over HTTP (default: none)")
    parser.add_argument("--store", metavar="FOLDER", help="keep every context in this folder (default: nothing is kept)")
    parser.add_argument(
        "--error-max", type=float, help="relative error that answers may have where a query names none, 0 to 1 (default 0.02)"
    )
    parser.add_argument("--threads", type=int, help="how many threads a call may use (default KVDB_THREADS, or the usable CPUs)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        from kvdb.server.serve import run  # so that other commands need no gRPC
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb serve needs {error.name}, which is not installed; pip install 'kvdb[server]'") from None

    config = configuration.load(given.config)
    flags = {name: value for name in ("host", "port") if (value := getattr(given, name)) is not None}
    config = replace(config, server=replace(config.server, **flags))
    if given.metrics_port is not None:
        config = replace(config, metrics=replace(config.metrics, port=given.metrics_port))
    if given.store is not None:
        config = replace(config, storage=replace(config.storage, path=given.store))
    if given.error_max is not None:
        config = replace(config, optimizer=replace(config.optimizer, error_max=given.error_max))
    if given.threads is not None:
        config = replace(config, cpu=configuration.CpuConfig(given.threads))
    return run(config)
