"""Explains that the compiled kernels are missing. Where they are there, Python finds the extension module of this name first."""

raise ImportError("kvdb's kernels are not compiled; run make test, or pip install .")
