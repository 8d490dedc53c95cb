"""What a client needs for TLS."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvdb.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """Files in PEM for `kvdbs://`. ca: the certificates that sign the server's, "" for those that gRPC brings. cert, key: the
    client's own certificate and its key, for a server that asks for them (server.tls_client_ca)."""

    ca: str | Path = ""
    cert: str | Path = ""
    key: str | Path = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("a client's certificate and its key go together: Tls(cert=..., key=...)")

    @classmethod
    def of_environment(cls) -> Self:
        """What KVDB_TLS_CA, KVDB_TLS_CERT and KVDB_TLS_KEY name. Raises ConfigError."""
        return cls(*(os.environ.get(f"KVDB_TLS_{name}", "") for name in ("CA", "CERT", "KEY")))

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of ca, key and cert, None for each that is not named. Raises ConfigError for files that cannot be read."""
        found = []
        for path in (self.ca, self.key, self.cert):
            try:
                found.append(Path(path).read_bytes() if path else None)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read ({error.strerror}); expected a file in PEM") from None
        ca, key, cert = found
        return ca, key, cert
