"""Importing changes nothing: no thread, no socket, no file, no other library touched."""

import subprocess
import sys
from textwrap import dedent

import pytest

from tests.architecture.source import PACKAGES, ROOT, foreign_imports, modules

NOT_INSTALLED = (
    "engine_adapter.langchain.chat_model",
    "engine_adapter.llama_index.llm",
    "engine_adapter.llama_index.synthesizer",
    "engine_adapter.sglang.storage",
    "engine_adapter.vllm.attention",
    "engine_adapter.vllm.attention_layers",
    "engine_adapter.vllm.blend",
    "engine_adapter.vllm.connector",
    "engine_adapter.vllm.events",
    "engine_adapter.vllm.metrics",
    "engine_adapter.vllm.plugin",
)
"""Modules that stand on a package that nobody has to have; their own tests import them."""

HEAVY = ("torch", "transformers", "safetensors", "grpc", "google.protobuf", "triton", "matplotlib")

# What a process does while it imports, told by the interpreter's audit events, once the libraries that we import are there:
# what they do is their business. -B keeps the process from writing byte code.
WATCH = """
import os, sys
{before}

CHANGES = ("os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
seen = []

def watch(event, args):
    if event == "open":
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(str(mode or "")) & set("wax+"):
            seen.append((event, path))
    elif event.startswith(("socket.", "subprocess.", "_thread.start", "os.fork", "os.putenv", *CHANGES)):
        seen.append((event, args))

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

running = threads()
sys.addaudithook(watch)
import {names}
assert not seen, seen
assert threads() == running, f"{{threads() - running}} more threads"
"""

TRANSFORMERS = """
import torch
from transformers import cache_utils, generation, masking_utils, modeling_utils
from transformers.models.llama import modeling_llama

def state():
    places = [cache_utils, generation.GenerationMixin, masking_utils, modeling_utils, modeling_utils.PreTrainedModel,
              modeling_llama, modeling_llama.LlamaAttention, torch.nn.functional]
    functions = [modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS]
    return [sorted(f.keys()) for f in functions], [{k: id(v) for k, v in vars(p).items()} for p in places]

before = state()
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_changes_nothing_and_loads_nothing_heavy(package: str) -> None:
    run(
        WATCH.format(before="import numpy, ml_dtypes", names=package),
        f"assert not (loaded := sys.modules.keys() & {set(HEAVY)!r}), loaded",
    )


def test_importing_every_module_changes_nothing_and_leaves_transformers_as_it_was() -> None:
    names = ", ".join(module.name for module in modules() if module.name not in NOT_INSTALLED)
    run(WATCH.format(before=f"{foreign_imports()}\n{TRANSFORMERS}", names=names), "assert state() == before")


def run(*scripts: str) -> None:
    """Run Python in a process of its own, so that nothing this process has loaded counts. It fails the test if it fails."""
    script = "\n".join(dedent(script) for script in scripts)
    done = subprocess.run([sys.executable, "-B", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
