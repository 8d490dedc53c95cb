"""Host pools as SGLang lays them out, and SGLang's own base classes where they are installed."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine_adapter.contexts import ModelContexts

PAGE = 16
PAGES = 12


@dataclass
class Pool:
    """What a backend sees of `MHATokenToKVPoolHost`, whose module wants a GPU's kernels: the buffer and its layout's name."""

    kv_buffer: torch.Tensor
    layout: str
    page_size: int = PAGE
    head_dim: int = 16

    def get_data_page(self, index):
        """A page, flat, by the same slices as SGLang's."""
        page = index // self.page_size
        match self.layout:
            case "layer_first":
                return self.kv_buffer[:, :, index : index + self.page_size].flatten()
            case "page_first":
                return self.kv_buffer[:, index : index + self.page_size].flatten()
            case _:
                return self.kv_buffer[:, page : page + 1].flatten()


@pytest.fixture(params=["layer_first", "page_first", "page_first_direct", "page_head"])
def make_pool(request, spec):
    """`make_pool(seed)` makes a pool of random numbers, zeros for None."""
    layers, heads, dim, tokens = spec.layers, spec.kv_heads, spec.head_dim, PAGE * PAGES
    shape = {
        "layer_first": (2, layers, tokens, heads, dim),
        "page_first": (2, tokens, layers, heads, dim),
        "page_first_direct": (2, PAGES, layers, PAGE, heads, dim),
        "page_head": (2, PAGES, heads, PAGE, layers, dim),
    }[request.param]

    def make(seed):
        numbers = torch.zeros(shape) if seed is None else torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return Pool(numbers, request.param)

    return make


@pytest.fixture
def contexts(db, spec):
    return ModelContexts(db, spec, "sglang")


@pytest.fixture(scope="session")
def sglang():
    """SGLang's modules out of a folder, without the engine: `make sglang-test` puts them there."""
    folder = os.environ.get("KVDB_SGLANG")
    if not folder:
        pytest.skip("KVDB_SGLANG names no folder with the package sglang; make sglang-test does")
    for name in ("sglang", "sglang.srt"):
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
