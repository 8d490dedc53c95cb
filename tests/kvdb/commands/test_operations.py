"""The commands of docs/operations.md, each as it stands there, but for ports, in a folder of its own."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdb import ModelSpec, Tls, connect
from kvdb.__main__ import main

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text()
TOOLS = ("bash", "openssl", "curl")


def free_ports():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.mark.needs_folder
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"the commands need {', '.join(TOOLS)}")
def test_ten_commands_lead_to_a_server_with_tls_and_two_tenants(tmp_path, monkeypatch, capfd):
    commands, later = (block.split("```")[0].strip().splitlines() for block in DOCUMENT.split("```sh\n")[1:])
    assert len(commands) == 10
    assert commands[0].startswith("python3 -m venv")  # what it makes is there already
    grpc, metrics = free_ports()
    ports = {"localhost:7700": f"localhost:{grpc}", "9464": str(metrics)}
    commands = [re.sub("|".join(ports), lambda found: ports[found.group()], command) for command in commands[1:] + later]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVDB_SERVER__PORT", str(grpc))
    monkeypatch.setenv("KVDB_OPTIMIZER__CALIBRATE_AT_START", "false")
    monkeypatch.setenv("KVDB_OPTIMIZER__MACHINE_FILE", "")  # it measures nothing, and leaves nothing behind
    running, said = None, []
    try:
        for command in commands:
            if command.startswith("export "):
                for pair in subprocess.check_output(["bash", "-c", f"{command}; env"], text=True).splitlines():
                    if pair.startswith(("KVDB_TOKEN=", "KVDB_TLS_CA=")):
                        monkeypatch.setenv(*pair.split("=", 1))
            elif command.endswith(" &"):
                words = [sys.executable, "-m", "kvdb", *shlex.split(command.removesuffix(" &"))[1:]]
                running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
                assert " ready on kvdbs://" in running.stdout.readline()
            elif command.startswith("kvdb "):
                said.append(kvdb(command, tmp_path, capfd))
                if command.startswith("kvdb verify"):
                    see_only_their_own(tmp_path, f"kvdbs://localhost:{grpc}")
            else:
                subprocess.run(["bash", "-c", command], check=True, timeout=60)
    finally:
        if running:
            running.terminate()
            assert running.wait(30) == 0
            running.stdout.close()
    written = (tmp_path / "kvdb.toml").read_text()
    assert os.environ["KVDB_TOKEN"] not in written + (tmp_path / "tokens.json").read_text()
    assert "no context is stored" in said[4]
    assert "its catalogue, files and pools of blocks agree" in said[6]
    assert main(["verify", "--server", str(tmp_path / "backup")]) == 0


def see_only_their_own(folder, target):
    spec = ModelSpec(name="m", layers=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32")
    kv = np.ones((1, 3, 8), np.float32)
    found = {}
    for tenant in ("search", "chat", "operator"):
        token, tls = (folder / f"{tenant}.token").read_text().strip(), Tls(ca=folder / "cert.pem")
        with connect(target, token=token, tls=tls) as db:
            if tenant == "search":
                db.import_context(spec, [1, 2, 3], [(kv, kv)], name="doc")
            found[tenant] = [info.name for info in db.contexts()]
    assert found == {"search": ["doc"], "chat": [], "operator": ["search/doc"]}


def kvdb(command, folder, capfd):
    """What a command says, which has to succeed; `> FILE` keeps it."""
    words = shlex.split(command.replace("$PWD", str(folder)))[1:]
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
    capfd.readouterr()
    assert main(words) == 0, command
    said = capfd.readouterr().out
    if target:
        (folder / target).write_text(said)
    return said


def test_every_alert_is_explained():
    rules = re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert re.findall(r"^\| (Kvdb\w+) \|", DOCUMENT, re.MULTILINE) == rules
