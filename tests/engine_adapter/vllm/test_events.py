"""KV events, in a process that has vLLM. `make vllm-test` runs it."""

import json
import os
import subprocess

import pytest

from tests.engine_adapter.vllm.conftest import ROOT


def test_full_blocks_that_were_stored_and_those_that_were_missed_are_told():
    python = os.environ.get("KVDB_VLLM")
    if not python:
        pytest.skip("KVDB_VLLM names no Python with vLLM; make vllm-test does")
    command = [python, "-m", "tests.engine_adapter.vllm.events_process"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["added"] == [[12], 11, list(range(16, 32)), 16, "STORAGE"]
    assert told["removed"] == [[11, 12], "STORAGE"]
    assert told["nothing"] is None
