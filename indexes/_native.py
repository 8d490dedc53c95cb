"""Explains that the compiled kernels are missing. Where they are there, Python finds the extension module of this name first."""

raise ImportError("the kernels of kvdb's indexes are not compiled; run make test, or pip install .")
