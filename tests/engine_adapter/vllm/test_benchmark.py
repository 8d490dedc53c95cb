"""Benchmarks compare plain vLLM with vLLM on kvdb on the same processors. `make vllm-test` runs these."""

import json
import os
import subprocess

import pytest

from benchmarks import vllm_binding
from engine_adapter.models.pretrained import REASON
from tests.engine_adapter.vllm.conftest import MODEL, ROOT

SCRIPT = """
import argparse, json, sys
from pathlib import Path
from benchmarks.vllm import kvdb_in, prose, run
given, call = argparse.Namespace(dtype="float32"), [[{"prompt": prose(0, 200), "tokens": 2}]]
print(json.dumps([run(given, connector, calls=call)["binding"] for connector in (None, kvdb_in(Path(sys.argv[1])))]))
"""


def test_plain_vllm_and_vllm_on_kvdb_have_the_same_processors(tmp_path):
    python = os.environ.get("KVDB_VLLM")
    if not python:
        pytest.skip("KVDB_VLLM names no Python with vLLM; make vllm-test does")
    if MODEL is None:
        pytest.skip(REASON)
    command = [python, "-c", SCRIPT, str(tmp_path / "store")]
    own = {"XDG_CACHE_HOME": str(MODEL.parents[2])}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, ours = json.loads(done.stdout.splitlines()[-1])
    assert plain == ours == vllm_binding.wanted()
