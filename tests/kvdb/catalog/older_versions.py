"""What `store_version_1.tar.xz` to `store_version_3.tar.xz` hold: the contexts of stores that older versions of the format
wrote, and nothing random."""

import numpy as np

import kvdb
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig

SPEC = kvdb.ModelSpec("first", layers=2, q_heads=2, kv_heads=1, head_dim=16, dtype="float32", rope=kvdb.Rope())
DOC, CHUNK, BEHIND = np.arange(40) % 13, np.arange(20) % 7, np.arange(18) % 5
LONGER = np.r_[DOC[:30], 50, 51, 52]
CONFIG = Config(
    storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
    optimizer=OptimizerConfig(machine_file=""),
    indexes=IndexConfig(on_demand="", automatic=False),
)


def kv_of(tokens):
    """Keys and values, a pair for each layer: those of each token depend on all before it, as a model's do."""
    before = np.cumsum(np.asarray(tokens) + 1)[:, None]
    waves = [np.sin(before * (np.arange(SPEC.head_dim) + 1) * (number + 1) / 7) for number in range(2 * SPEC.layers)]
    return [(waves[2 * layer][None].astype(np.float32), waves[2 * layer + 1][None].astype(np.float32)) for layer in range(2)]
