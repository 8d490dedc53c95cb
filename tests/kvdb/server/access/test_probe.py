"""The probes of deploy/ and docs/operations.md are carried out as they stand there, but for ports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
import yaml

from kvdb.__main__ import main
from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.server.http.opening import open_http
from kvdb.server.tenancy.credentials import Credentials

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The paths of a CA, and of the certificates of localhost and a client with their keys."""
    folder, ca = tmp_path_factory.mktemp("certificates"), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca")
    for name, pair in {"server": ca.issue_cert("localhost"), "client": ca.issue_cert("client")}.items():
        pair.private_key_and_cert_chain_pem.write_to_path(folder / name)
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.fixture
def port(serve, files):
    """The port of a server that asks for a certificate and a token."""
    server = serve(tls_cert=files["server"], tls_key=files["server"], tls_client_ca=files["ca"], token="geheim")
    return int(server.target.rpartition(":")[2])


@pytest.fixture
def check(tmp_path):
    """Carries out the image's health check with these variables, port 9464 being `port`; its exit status."""
    for name, words in {"kvdb": "-m kvdb", "python": ""}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tmp_path / name).chmod(0o700)
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    command = re.search(r"^HEALTHCHECK .*? CMD (.*)$", text, re.MULTILINE).group(1)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVDB_")}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def carry_out(port=9464, **more):
        line = command.replace("9464", str(port))
        return subprocess.run(
            ["/bin/sh", "-c", line], env=kept | own | more, timeout=60, capture_output=True, check=False
        ).returncode

    return carry_out


def test_the_image_is_healthy_behind_certificates_and_a_token(check, port, files):
    own = {"KVDB_PROBE": f"kvdbs://localhost:{port}", "KVDB_TOKEN": "geheim", "KVDB_TLS_CA": files["ca"]}
    assert check(**own, KVDB_TLS_CERT=files["client"], KVDB_TLS_KEY=files["client"]) == 0


def test_without_tls_the_image_is_healthy_while_it_takes_calls(check):
    ready, server = [True], ServerConfig(token="geheim")
    config = Config(server=server, metrics=MetricsConfig(port=0))
    http = open_http(config, lambda: ready[0], [], Credentials(server))
    http.start()
    try:
        port = int(http.url.rpartition(":")[2])
        assert check(port) == 0
        ready[0] = False
        assert check(port) == 1
    finally:
        http.stop()


@pytest.mark.parametrize(("token", "status"), [("geheim", 0), ("falsch", 5)])
def test_the_probe_for_kubernetes_tells_who_is_let_in(port, files, monkeypatch, token, status):
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    program, *arguments = yaml.safe_load(shown)["exec"]["command"]
    for name, value in {"TLS_CA": files["ca"], "TLS_CERT": files["client"], "TLS_KEY": files["client"], "TOKEN": token}.items():
        monkeypatch.setenv(f"KVDB_{name}", value)
    assert program == "kvdb"
    assert main([word.replace(":7700", f":{port}") for word in arguments]) == status
