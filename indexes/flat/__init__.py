"""Short codes of all keys, which a search scans: what it finds is exact."""

from indexes.flat.codes import CHUNK
from indexes.flat.index import Flat

__all__ = ["CHUNK", "Flat"]
