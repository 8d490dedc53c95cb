"""Explains that the compiled kernels are missing. Where they are there, Python finds the extension module of this name first."""

from indexes.missing_kernels import explanation

raise ImportError(explanation(__file__))
