"""The one check of what a client brings, for every port: it says whose call it is."""

import hmac
from collections.abc import Mapping
from typing import Any

import grpc

from kvdb.config import ServerConfig
from kvdb.errors import ConfigError, Unauthenticated
from kvdb.server.tenancy.tokens_file import Principal, TokensFile
from kvdb.types.tenants import NAME

OPERATOR = Principal("", admin=True)
"""The one who has the server's own token; everybody where nothing is asked for."""
BEARER = "Bearer "


class Credentials:
    """What the server asks of clients. Thread-safe. asks: whether it asks for a token, or for a certificate that names a
    tenant."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for a file of tokens that cannot be read."""
        self._token = config.token.encode()
        self._file = TokensFile(config.tokens_file) if config.tokens_file else None
        self._by_certificate = config.tls_tenants
        self.asks_for_token = bool(self._token or self._file)
        self.asks = self.asks_for_token or self._by_certificate

    def of_token(self, token: bytes) -> Principal:
        """The owner of a token, b"" for none. Raises Unauthenticated, also where the file of tokens cannot be read."""
        if not self.asks:
            return OPERATOR
        if self._token and hmac.compare_digest(token, self._token):
            return OPERATOR
        try:
            found = self._file.find(token) if self._file is not None else None
        except ConfigError as error:
            raise Unauthenticated("the server cannot read its file of tokens; its log has more") from error
        if found is None:
            raise Unauthenticated("the call brings no token or a wrong one; pass the server's with connect(..., token=...)")
        return found

    def of_header(self, authorization: str | bytes) -> Principal:
        """The sender of a header, "" for none. Raises Unauthenticated."""
        given = authorization if isinstance(authorization, bytes) else authorization.encode(errors="replace")
        prefix = BEARER.encode()
        return self.of_token(given[len(prefix) :] if given.startswith(prefix) else b"")

    def of_call(self, context: grpc.ServicerContext) -> Principal:
        """The maker of a call: by its token, and where it brings none, and certificates name tenants, by its certificate. Raises
        Unauthenticated."""
        metadata: Mapping[str, Any] = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization", "")
        if given or not self._by_certificate:
            return self.of_header(given)
        names: list[bytes] = list(context.auth_context().get("x509_common_name", ()))  # type: ignore[arg-type]
        name = names[0].decode(errors="replace") if len(names) == 1 else ""
        if not NAME.fullmatch(name):
            raise Unauthenticated(f"the certificate has the common name {name!r}; expected the name of a tenant")
        return Principal(name)

    def still_let_in(self, context: grpc.ServicerContext) -> bool:
        """Whether the maker of a call that was let in would be let in now."""
        try:
            self.of_call(context)
        except Unauthenticated:
            return False
        return True

    def lets_in(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a call with these headers may be looked at; who it is, is asked again when it is carried out."""
        given = metadata.get("authorization", "")
        if self._by_certificate and not given:
            return True
        try:
            self.of_header(given)
        except Unauthenticated:
            return False
        return True
