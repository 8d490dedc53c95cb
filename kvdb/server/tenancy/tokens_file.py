"""The tokens of a server with several tenants, in a JSON file that holds their hashes alone.

A token is 256 random bits, so nobody finds it by trying, and one SHA-256 hides it: a slow hash is for what people choose.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from kvdb.errors import ConfigError
from kvdb.types.tenants import NAME

TOKEN_BYTES = 32
HASH = re.compile(r"[0-9a-f]{64}")


class Principal(NamedTuple):
    """The maker of a call. tenant: "" for whoever runs the server. admin: whether it sees what all tenants have."""

    tenant: str
    admin: bool = False


class _Entry(NamedTuple):
    sha256: str
    principal: Principal


class TokensFile:
    """A file of tokens, read again when it has changed, so that a token can be added and revoked while the server runs.
    Thread-safe. A file that has become wrong lets nobody in until it is mended."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._path = path
        self._lock = Lock()
        self._seen: tuple[int, ...] = ()
        self._entries: list[_Entry] = []
        self._look()

    def find(self, token: bytes) -> Principal | None:
        """The owner of a token, None where it is nobody's. It is compared with every hash, in a time that tells nothing of them.
        Raises ConfigError for a file that cannot be read any more."""
        given, found = hashlib.sha256(token).hexdigest(), None
        for entry in self._look():
            if hmac.compare_digest(entry.sha256, given):
                found = entry.principal
        return found

    def _look(self) -> list[_Entry]:
        with self._lock:
            try:
                stat = os.stat(self._path)
                seen = stat.st_mtime_ns, stat.st_size, stat.st_ino
                if seen != self._seen:
                    self._entries, self._seen = [], ()
                    self._entries, self._seen = _read(Path(self._path)), seen
            except OSError as error:
                raise ConfigError(f"server.tokens_file is {self._path}, which cannot be read ({error.strerror})") from None
            return self._entries


def new_token(path: Path, tenant: str, *, admin: bool = False) -> str:
    """A new token of a tenant, whose hash is added to the file, which is made if it is not there. Raises ConfigError for a tenant
    that cannot be, a file that cannot be written, and one that another process writes."""
    if not NAME.fullmatch(tenant):
        raise ConfigError(f"a tenant is called {tenant!r}; expected letters, digits, dots, dashes and underscores, at most 64")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    added = _Entry(hashlib.sha256(token.encode()).hexdigest(), Principal(tenant, admin))
    beside = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            try:
                entries = [*(_read(path) if path.exists() else []), added]
                told = [{"tenant": who.tenant, "sha256": sha256, "admin": who.admin} for sha256, who in entries]
                file.write(json.dumps({"tokens": told}, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
                os.replace(beside, path)
            except BaseException:
                os.unlink(beside)
                raise
    except FileExistsError:
        raise ConfigError(f"{beside} is there, so another process adds a token; try again, or remove it if none does") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    return token


def _read(path: Path) -> list[_Entry]:
    """The entries of a file. Raises OSError, and ConfigError for one that is no list of tokens."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}); kvdb token new writes one") from None
    listed = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise ConfigError(f'{path} holds no list of tokens; expected {{"tokens": [...]}}, as kvdb token new writes')
    return [_entry(path, number, one) for number, one in enumerate(listed)]


def _entry(path: Path, number: int, value: Any) -> _Entry:
    known = {"tenant", "sha256", "admin"}
    if isinstance(value, dict) and value.keys() <= known:
        tenant, sha256, admin = str(value.get("tenant")), str(value.get("sha256")), value.get("admin", False)
        if NAME.fullmatch(tenant) and HASH.fullmatch(sha256) and isinstance(admin, bool):
            return _Entry(sha256, Principal(tenant, admin))
    raise ConfigError(f"token {number} of {path} is wrong; expected a tenant, the sha256 of its token in hex, and perhaps admin")
