"""No tenant is handed what another's blocks held."""

import ctypes

import pytest

from kvdb.client.client import Client
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.server.tenancy.memory import for_tenants
from kvdb.storage.block_layout import BlockLayout
from tests.database import database


@pytest.mark.parametrize(
    ("settings", "overwrites"),
    [
        ({}, False),
        ({"tokens_file": "f"}, True),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca", "tls_tenants": True}, True),
    ],
)
def test_a_server_with_tenants_overwrites_and_says_nothing_of_the_rest(settings, overwrites):
    config = Config(server=ServerConfig(**settings), storage=StorageConfig(block_size=32))
    found = for_tenants(config).storage
    assert (found.overwrite_freed, found.block_size) == (overwrites, 32)


@pytest.mark.parametrize("overwrites", [True, False])
def test_blocks_of_a_dropped_context_are_zeros_when_they_are_given_out_again(overwrites, spec, make_kv):
    kv = make_kv(spec, 200)
    with database(config=Config(storage=StorageConfig(overwrite_freed=overwrites))) as db:
        Client(db).import_context(spec, kv.tokens, kv.pairs(), name="theirs")
        tier = db._blocks._tier(BlockLayout.of(spec.shape(0), 64))
        used = tier.stats().blocks_used
        db.drop("theirs")
        blocks = tier.allocate(used)
        held = [ctypes.string_at(int(address), tier.block_nbytes) for address in tier.addresses(blocks)]
        tier.release(blocks)
    assert any(any(block) for block in held) is not overwrites
