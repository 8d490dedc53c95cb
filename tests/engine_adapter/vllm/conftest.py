"""vLLM's blocks as a reference packs them, and vLLM itself where it is installed."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from engine_adapter.contexts import ModelContexts
from engine_adapter.models.pretrained import REASON, real_model_folder
from engine_adapter.vllm.layout import PackedLayout

BLOCK = 16
BLOCKS = 12
ROOT = Path(__file__).parents[3]
MODEL = real_model_folder()
"""Found before the tests have a cache folder of their own."""


def documents():
    """Some ten thousand words of prose: what docs/internals says."""
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "internals").glob("*.md")))


class Packing:
    """A cache that packs a block in an order of its own, as vLLM's operation writes it."""

    def __init__(self, spec, seed=5):
        self.spec = spec
        self.form = (2, spec.kv_heads, BLOCK, spec.head_dim)
        count = 2 * spec.kv_heads * BLOCK * spec.head_dim
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).reshape(self.form)

    def write(self, key, value, cache, slots):
        flat = cache.view(cache.shape[0], -1)
        for token, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, BLOCK)
            for which, numbers in enumerate((key, value)):
                flat[block, self.order[which, :, place]] = numbers[token]

    def cache(self, dtype=torch.float32, blocks=BLOCKS):
        """One with -1 everywhere, which no test writes."""
        return torch.full((blocks, self.spec.kv_heads, BLOCK, 2 * self.spec.head_dim), -1.0, dtype=dtype)

    def filled(self, k, v, blocks):
        """A cache whose blocks hold k and v, both `[kv_heads, n, head_dim]`."""
        cache = self.cache()
        slots = torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(k.shape[1])])
        self.write(torch.as_tensor(k).transpose(0, 1), torch.as_tensor(v).transpose(0, 1), cache, slots)
        return cache


@pytest.fixture
def packing(spec):
    return Packing(spec)


@pytest.fixture
def layout(packing, spec):
    return PackedLayout.learn(packing.write, packing.cache(), spec.kv_heads, BLOCK, spec.head_dim)


@pytest.fixture
def contexts(db, spec):
    return ModelContexts(db, spec, "vllm")


@pytest.fixture(scope="session")
def vllm_run(tmp_path_factory):
    """`vllm_run(calls, target=None, **given)` runs vLLM in a process of its own, see `vllm_process`; returns what that wrote, and
    its log. processes: whether vLLM's scheduler and its worker are processes of their own. plugin: whether kvdb is installed as
    vLLM's plugin. `KVDB_VLLM` names the Python that has vLLM: `make vllm-test` sets it."""
    python = os.environ.get("KVDB_VLLM")
    if not python:
        pytest.skip("KVDB_VLLM names no Python with vLLM; make vllm-test does")
    if MODEL is None:
        pytest.skip(REASON)

    site = tmp_path_factory.mktemp("site")
    (site / "plugin-0.dist-info").mkdir()
    (site / "plugin-0.dist-info" / "METADATA").write_text("Name: plugin\nVersion: 0\n")
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in names.items()]
    (site / "plugin-0.dist-info" / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))

    def run(
        calls,
        target=None,
        *,
        failing_read=0,
        processes=False,
        attention=None,
        blend=None,
        loads="layerwise",
        gone_at=0,
        version=None,
        plugin=True,
        **options,
    ):
        folder = tmp_path_factory.mktemp("vllm")
        given = {"model": str(MODEL), "target": target, "calls": calls, "options": options, "failing_read": failing_read}
        given |= {"extra": {"attention": attention, "loads": loads, "blend": blend}, "gone_at": gone_at, "version": version}
        (folder / "calls.json").write_text(json.dumps(given))
        command = [
            python,
            "-m",
            "tests.engine_adapter.vllm.vllm_process",
            str(folder / "calls.json"),
            str(folder / "results.json"),
        ]
        own = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": os.pathsep.join([*([str(site)] if plugin else []), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads((folder / "results.json").read_text()), done.stdout + done.stderr

    return run
