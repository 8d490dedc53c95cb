"""The example for vLLM, run twice as its first lines say."""

import os
import subprocess

import pytest

from engine_adapter.models.pretrained import REASON, real_model_folder
from tests.architecture.source import ROOT

MODEL = real_model_folder()


@pytest.mark.skipif(MODEL is None, reason=REASON)
@pytest.mark.skipif("KVDB_VLLM" not in os.environ, reason="KVDB_VLLM names no Python with vLLM; make vllm-test does")
def test_the_second_run_of_the_example_finds_the_prompt_of_the_first(tmp_path):
    command = [os.environ["KVDB_VLLM"], "examples/vllm_prefix.py", str(MODEL), str(tmp_path / "store")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    found = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(int(done.stdout.partition(" tokens of the prompt were found")[0].split()[-3]))
    assert found[0] == 0
    assert found[1] > 500
