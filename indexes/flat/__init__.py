"""An index of short codes of all keys. A search scans them all, and finds exactly what brute force finds."""

from indexes.chunk_codes import CHUNK
from indexes.flat.index import Flat

__all__ = ["CHUNK", "Flat"]
