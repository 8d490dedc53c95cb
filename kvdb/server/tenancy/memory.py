"""Memory that goes from one tenant to another."""

from dataclasses import replace

from kvdb.config import Config


def for_tenants(config: Config) -> Config:
    """The configuration, which lets no block be handed to another tenant with what stood in it, where there are tenants."""
    if not (config.server.tokens_file or config.server.tls_tenants):
        return config
    return replace(config, storage=replace(config.storage, overwrite_freed=True))
