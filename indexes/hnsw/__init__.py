"""A graph over the keys: a walk finds what a query wants without looking at most of them."""

from indexes.hnsw.index import Hnsw
from indexes.hnsw.settings import Settings

__all__ = ["Hnsw", "Settings"]
