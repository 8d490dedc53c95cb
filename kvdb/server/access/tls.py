"""TLS of a server's ports: certificates as files in PEM."""

import ssl
from pathlib import Path

import grpc

from kvdb.config import ServerConfig
from kvdb.errors import ConfigError


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """What the gRPC port answers TLS with; None for a port without. With server.tls_client_ca, whoever has no certificate of it
    comes no further than the handshake. Raises ConfigError for files that are no certificate and its key."""
    context = ssl_context(config)
    if context is None:
        return None
    ca = _read("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    pair = (_read("tls_key", config.tls_key), _read("tls_cert", config.tls_cert))
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What the HTTP port answers TLS with, as `server_credentials`; it asks nobody for a certificate, but for the token. gRPC
    says nothing of wrong files until a client comes, so they are tried here."""
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # of which SSLError is one
        raise ConfigError(
            f"server.tls_cert and server.tls_key are {config.tls_cert} and {config.tls_key}, which are no certificate and "
            f"its key in PEM ({error.strerror or error})"
        ) from None
    if config.tls_client_ca:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(config.tls_client_ca)
        except OSError as error:
            raise ConfigError(
                f"server.tls_client_ca is {config.tls_client_ca}, which holds no certificates in PEM ({error.strerror or error})"
            ) from None
    return context


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{setting} is {path}, which cannot be read ({error.strerror})") from None
