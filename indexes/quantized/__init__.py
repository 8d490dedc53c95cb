"""Codes of four bits of all keys and values: the few tokens with the largest weights are read, the rest is estimated."""

from indexes.quantized.index import Quantized

__all__ = ["Quantized"]
