"""The packages that adapters of the RAG engine stand on, out of a folder: `make rag-adapters-test` puts them there."""

import importlib.util
import os
import sys

import pytest


def wanted(package):
    """Skips unless the package is there. The folder comes last, so that what is installed goes before it."""
    folder = os.environ.get("KVDB_RAG_ADAPTERS")
    if folder and folder not in sys.path:
        sys.path.append(os.path.abspath(folder))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, nor in a folder that KVDB_RAG_ADAPTERS names; make rag-adapters-test does")
