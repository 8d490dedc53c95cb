"""A graph over the keys: a walk finds the tokens that a query needs without looking at most of the others."""

from indexes.hnsw.index import Hnsw
from indexes.hnsw.settings import Settings

__all__ = ["Hnsw", "Settings"]
