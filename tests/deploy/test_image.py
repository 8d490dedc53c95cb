"""The image, alone and by compose beside Prometheus. `make deploy-test` builds it and names it in KVDB_IMAGE; without it nothing
runs. Grafana is left out: it shows what Prometheus has, and tests of its dashboard ask for no Grafana."""

import json
import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen
from uuid import uuid4

import numpy as np
import pytest
import trustme

from kvdb import ModelSpec, connect
from tests.waiting import until

IMAGE = os.environ.get("KVDB_IMAGE", "")
pytestmark = pytest.mark.skipif(not IMAGE, reason="KVDB_IMAGE names no image; make deploy-test")
ROOT = Path(__file__).parents[2]
SECONDS_MAX = 120
TOKEN = "geheim"
SPEC = ModelSpec(name="m", layers=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32")
KV = np.arange(24, dtype=np.float32).reshape(1, 3, 8)


def docker(*arguments, **options):
    """What a command of docker's says, which has to succeed."""
    done = subprocess.run(
        ["docker", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=SECONDS_MAX, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def state_of(container):
    return json.loads(docker("inspect", container, "--format", "{{json .State}}"))


class Stack:
    """Two services of deploy/compose.yaml, on free ports, in a project of their own."""

    def __init__(self, project):
        self.port, self.metrics, self.prometheus = (free_port() for _ in range(3))
        self.target = f"kvdb://127.0.0.1:{self.port}"
        ports = {"KVDB_PORT": self.port, "KVDB_METRICS_PORT": self.metrics, "PROMETHEUS_PORT": self.prometheus}
        own = {"KVDB_IMAGE": IMAGE, "KVDB_TOKEN": TOKEN, "GRAFANA_PASSWORD": "unused"}
        self._environment = os.environ | own | {name: str(port) for name, port in ports.items()}
        self._project = project

    def compose(self, *arguments):
        before = ("compose", "--file", ROOT / "deploy" / "compose.yaml", "--project-name", self._project)
        return docker(*before, *arguments, env=self._environment)

    def asked(self, path):
        """What Prometheus answers."""
        with urlopen(f"http://127.0.0.1:{self.prometheus}/api/v1/{path}", timeout=10) as reply:
            return json.load(reply)["data"]

    @property
    def container(self):
        return self.compose("ps", "--all", "--quiet", "kvdb")


@pytest.fixture(scope="module")
def stack():
    running = Stack(f"kvdb-test-{uuid4().hex[:8]}")
    try:
        running.compose("up", "--detach", "--no-build", "kvdb", "prometheus")
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "1")


def test_compose_waits_until_the_server_is_healthy_before_prometheus(stack):
    assert state_of(stack.container)["Health"]["Status"] == "healthy"
    with urlopen(f"http://127.0.0.1:{stack.metrics}/readyz", timeout=10) as reply:
        assert reply.status == 200


def test_the_server_is_nobody_of_consequence(stack):
    status = dict(line.split(":\t", 1) for line in stack.compose("exec", "kvdb", "cat", "/proc/1/status").splitlines())
    assert set(status["Uid"].split()) == {"10001"}
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.compose("exec", "kvdb", "touch", "/opt/kvdb/new")


def test_prometheus_finds_the_server_the_rules_and_the_token(stack):
    def up():
        with suppress(OSError):  # it listens a moment after it was started
            return [target["health"] for target in stack.asked("targets")["activeTargets"]] == ["up"]

    until(up, "Prometheus does not find it", seconds_max=SECONDS_MAX)
    (group,) = stack.asked("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} > {"KvdbDown", "KvdbChecksumFailure"}
    with pytest.raises(OSError, match="401"):
        urlopen(f"http://127.0.0.1:{stack.metrics}/metrics", timeout=10)
    asking = Request(f"http://127.0.0.1:{stack.metrics}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urlopen(asking, timeout=10) as reply:
        assert b"kvdb_contexts 0" in reply.read()


def test_what_was_stored_is_there_after_a_restart(stack):
    with connect(stack.target, token=TOKEN) as db:
        db.import_context(SPEC, [1, 2, 3], [(KV, KV + 1)], name="doc")
    stack.compose("stop", "kvdb")
    ended = state_of(stack.container)
    assert (ended["ExitCode"], ended["OOMKilled"]) == (0, False)
    stack.compose("up", "--detach", "--no-build", "--wait", "kvdb")
    with connect(stack.target, token=TOKEN) as db, db.create_session(SPEC, [1, 2, 3]) as session:
        assert session.reused == 3
        np.testing.assert_array_equal(session.attention(0, np.zeros((1, 1, 8), np.float32))[0, 0], (KV + 1).mean(axis=(0, 1)))


def test_without_a_token_it_does_not_start():
    done = subprocess.run(["docker", "run", "--rm", IMAGE], capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert done.returncode == 2
    assert "asks nobody" in done.stderr


def test_the_image_is_a_client_too():
    assert docker("run", "--rm", IMAGE, "--version").startswith("kvdb ")
    assert "instruction set" in docker("run", "--rm", IMAGE, "doctor")


def test_with_tls_it_is_healthy_by_its_own_client(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for file in (tmp_path, *tmp_path.iterdir()):
        file.chmod(0o755)
    told = {
        "KVDB_TOKEN": TOKEN,
        "KVDB_SERVER__TLS_CERT": "/tls/cert.pem",
        "KVDB_SERVER__TLS_KEY": "/tls/key.pem",
        "KVDB_PROBE": "kvdbs://localhost:7700",
        "KVDB_TLS_CA": "/tls/ca.pem",
    }
    flags = [flag for name, value in told.items() for flag in ("--env", f"{name}={value}")]
    container = docker("run", "--detach", "--volume", f"{tmp_path}:/tls:ro", *flags, IMAGE)
    try:
        until(lambda: state_of(container)["Health"]["Status"] == "healthy", "it never gets healthy", seconds_max=SECONDS_MAX)
    finally:
        docker("rm", "--force", "--volumes", container)
