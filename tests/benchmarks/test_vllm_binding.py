"""Processes that a benchmark of vLLM compares have their threads on the same processors."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import vllm_binding

SEEN = "import json; from benchmarks.vllm_binding import seen; print(json.dumps(seen()))"


@pytest.mark.parametrize(
    "before", [{}, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_PLACES": "{0}"}], ids=["nothing", "one processor"]
)
def test_whatever_the_environment_says_a_process_has_all_processors(before):
    environment = os.environ | before | vllm_binding.environment()
    done = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == vllm_binding.wanted()
