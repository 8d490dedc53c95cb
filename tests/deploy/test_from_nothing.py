"""The ten commands of docs/operations.md as one script, the installation too, in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvdb.commands.test_operations import DOCUMENT, ROOT, free_ports

pytestmark = pytest.mark.skipif("KVDB_IMAGE" not in os.environ, reason="it takes minutes; make deploy-test")
SECONDS_MAX = 1200


def copied(folder):
    """The sources as git has them, with what is not committed yet."""
    listed = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def test_ten_commands_lead_from_nothing_to_a_server(tmp_path):
    copied(tmp_path)
    grpc, metrics = free_ports()
    ports = {"localhost:7700": f"localhost:{grpc}", "9464": str(metrics)}
    commands = DOCUMENT.split("```sh\n")[1].split("```")[0].strip().splitlines()
    assert len(commands) == 10
    script = re.sub("|".join(ports), lambda found: ports[found.group()], "\n".join(commands))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'jobs -p | xargs -r kill' EXIT\n{script}\nkill $!\nwait $!"],
        cwd=tmp_path,
        env={
            "PATH": f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path / "home"),
            "KVDB_SERVER__PORT": str(grpc),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f" ready on kvdbs://0.0.0.0:{grpc}" in done.stdout
    assert "no context is stored" in done.stdout
    assert ": 0 sessions, 0 contexts" in done.stdout
