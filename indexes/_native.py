"""Stands in where the compiled kernels are missing: the extension module of this name is found before it."""

raise ImportError("the kernels of kvdb's indexes are not compiled; run make test, or pip install .")
