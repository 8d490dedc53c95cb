"""The commands of docs/operations.md, each as it stands there, but for ports, in a folder of its own."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvdb.__main__ import main

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text()
TOOLS = ("bash", "openssl", "curl")


def free_ports():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"the commands need {', '.join(TOOLS)}")
def test_ten_commands_lead_to_a_server_with_tls(tmp_path, monkeypatch, capfd):
    commands = DOCUMENT.split("```sh\n")[1].split("```")[0].strip().splitlines()
    assert len(commands) == 10
    assert commands[0].startswith("python3 -m venv")  # what it makes is there already
    grpc, metrics = free_ports()
    ports = {"localhost:7700": f"localhost:{grpc}", "9464": str(metrics)}
    commands = [re.sub("|".join(ports), lambda found: ports[found.group()], command) for command in commands[1:]]
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
            else:
                subprocess.run(["bash", "-c", command], check=True, timeout=60)
    finally:
        if running:
            running.terminate()
            assert running.wait(30) == 0
            running.stdout.close()
    written = (tmp_path / "kvdb.toml").read_text()
    assert os.environ["KVDB_TOKEN"] not in written
    assert "no context is stored" in said[1]
    assert "its catalogue, files and pools of blocks agree" in said[3]
    assert main(["verify", "--server", str(tmp_path / "backup")]) == 0


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
