"""Tables of random tokens, and stored segments of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.cpu import CpuTier
from kvdb.storage.segment_folder import SegmentFolder
from kvdb.storage.segment_head import Contents
from kvdb.storage.segment_writing import SegmentWriting
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import DTYPES

PAGES = BlockLayout("bfloat16", kv_heads=2, head_dim=64, block_size=16)
"""Blocks of two pages, which are moved past the page cache."""
CRUMBS = BlockLayout("float32", kv_heads=2, head_dim=8, block_size=3)
"""Blocks of 384 bytes, which are not."""


class Home:
    """A folder of nobody."""

    key, setting = "a", "storage.path"

    def __init__(self, path):
        self.path = path

    def sync(self):
        pass

    def close(self):
        pass


def folder(path):
    """The store of files in a folder."""
    return SegmentFolder(Home(path))


def writing(store, key, contents, threads):
    """A segment that is begun in a store."""
    return SegmentWriting(key, contents, store.begin(key, contents.nbytes, whole_pages=contents.direct), threads)


def write(store, key, contents, tables, synced=True):
    """A stored segment of these tables, one a layer."""
    with ThreadPoolExecutor(2) as threads:
        digest = writing(store, key, contents, threads).finish(tables, "", synced=synced)
    stored = StoredSegment(store, key, contents, digest)
    stored.check_head()
    return stored


class Stored:
    """`layers` tables of `tokens` random tokens in a tier of their own. kv: one (k, v) a layer."""

    def __init__(self, layout=PAGES, layers=3, tokens=50, seed=0, dirty=False):
        self.layout, self.layers, self.tokens = layout, layers, tokens
        self.tier = CpuTier(layout.nbytes, 1 << 20, CpuBudget(None))
        rng = np.random.default_rng(seed)
        shape = layers, 2, layout.kv_heads, tokens, layout.head_dim
        self.kv = rng.standard_normal(shape, np.float32).astype(DTYPES[layout.dtype])
        if dirty:
            self.soil(7)
        self.tables = [BlockTable(self.tier, layout) for _ in range(layers)]
        for table, (k, v) in zip(self.tables, self.kv, strict=True):
            table.append(k, v)

    def soil(self, value):
        """Leave somebody's remains in blocks that are free afterwards."""
        table = BlockTable(self.tier, self.layout)
        n = self.layers * self.layout.blocks_for(self.tokens) * self.layout.block_size
        rest = np.full((self.layout.kv_heads, n, self.layout.head_dim), value, DTYPES[self.layout.dtype])
        table.append(rest, rest)
        table.release()

    def contents(self, key="a/0.segment"):
        return Contents(key, "digest", self.layers * (self.layout,), self.tokens)

    def write(self, path):
        """The segment as a file."""
        return write(folder(path.parent), path.name, self.contents(), self.tables)

    def empty(self):
        """Tables with blocks of remains, to read into."""
        self.soil(9)
        tables = [BlockTable(self.tier, self.layout) for _ in range(self.layers)]
        for table in tables:
            table.reserve(self.tokens)
        return tables

    def holds(self, table, layer):
        return bool((np.stack(table.read(0, self.tokens)) == self.kv[layer]).all())

    def close(self):
        self.tier.close()
