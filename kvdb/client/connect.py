"""`kvdb.connect`: embedded or remote, one interface."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import kvdb.validate as validate
from kvdb.client.client import Client
from kvdb.config import Config, CpuConfig, Timeouts, Tls, checked, quiet_grpc
from kvdb.database import Database
from kvdb.errors import InvalidArgument
from query_optimizer.custom_rules import PlacedRule

REMOTE = ("kvdb://", "kvdbs://", "kvdb+unix://")
ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
"""Matches a server's address that lacks kvdb:// before it."""


def connect(
    target: str | Path | None = None,
    *,
    token: str = "",
    timeout: float | Timeouts | None = None,
    tls: Tls | None = None,
    config: Config | None = None,
    threads: int | None = None,
    rules: Sequence[PlacedRule] = (),
) -> Client:
    """Open a database: in this process and in memory without a target, in this process and kept in a folder with its path, on a
    server with `kvdb://host:port`, over TLS with `kvdbs://host:port`.

    A database in this process, every session and every import belong to the process that opened them: in the child of a fork they
    raise ForkedProcess. A client of a server, and its contexts, connect anew there with the first call.

    A store keeps every context that was imported or stored, once that call has returned, and is open in one process at a time.
    token: the server's token. timeout: how many seconds each call on a server may take, or a table of them; a call, or a session,
    that has a timeout of its own goes by that. tls: the certificates for `kvdbs://`, if they are not those of this machine.
    config: settings of an embedded database. threads: config's cpu.threads, None for what config says. rules: rules for its
    optimizer beside its own, each with a name, `before` (the name of the rule that is asked next) and `when(facts, part, heads)`.

    Raises InvalidArgument for a target that names no database or a rule that cannot be added, Unavailable for a server that does
    not answer and a store that is open elsewhere, Unauthenticated for a wrong token, ForkedProcess in a child for a store
    that its parent had open, and ConfigError.
    """
    if not isinstance(target, str | Path | None):
        raise InvalidArgument(f"target is {target!r}; expected kvdb://host:port, a folder, or nothing for one in memory")
    if not isinstance(token, str):
        raise InvalidArgument(f"token is a {type(token).__name__}; expected the server's token as a string")
    added = list(validate.iterable("rules", rules, "rules of the optimizer"))
    if str(target).startswith(REMOTE):
        if config is not None or threads is not None or added:
            raise InvalidArgument(
                "a remote database has its own configuration, threads and rules; start the server with them: kvdb serve "
                "--config FILE"
            )
        quiet_grpc()
        from kvdb.client.remote.database import RemoteDatabase  # so that an embedded database needs no gRPC

        return Client(cast("Database", RemoteDatabase(str(target), token, Timeouts.of(timeout), tls)))
    if timeout is not None or tls is not None:
        raise InvalidArgument("an embedded database has no server; say timeout= to a call or a session of it, and no tls=")
    if target is None:
        return Client(Database(_with_threads(config, threads), added))
    if "://" in str(target) or target == "":
        raise InvalidArgument(
            f"{target!r} names no database; expected kvdb://host:port, kvdb+unix:///path, a folder, or nothing for one in memory"
        )
    if isinstance(target, str) and ADDRESS.fullmatch(target):
        raise InvalidArgument(f"{target} lacks its beginning; expected kvdb://{target} for the server there")
    return Client(Database(_at(target, _with_threads(config, threads)), added))


def _at(path: str | Path, config: Config | None) -> Config:
    """The configuration with the store at that path."""
    given = checked(config)
    if given.storage.path not in {"", str(path)}:
        raise InvalidArgument(f"target is {path!s}, and storage.path of the configuration {given.storage.path}; expected one")
    return replace(given, storage=replace(given.storage, path=str(path)))


def _with_threads(config: Config | None, threads: int | None) -> Config | None:
    return config if threads is None else replace(checked(config), cpu=CpuConfig(threads))
