"""Reuse of chunks wherever they stand (CacheBlend, arXiv 2405.16444): how keys move, which tokens are recomputed, how many.

Pure functions on arrays: no input or output, no engine.
"""
