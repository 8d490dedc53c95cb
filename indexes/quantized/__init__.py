"""Four-bit codes of all keys and values: the few tokens that weigh most are read as they are, the rest is estimated."""

from indexes.quantized.index import Quantized

__all__ = ["Quantized"]
