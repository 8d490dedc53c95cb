"""The contract is what the code speaks."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvdb.client.remote.imports import METHOD
from kvdb.client.remote.stream import DECODE
from kvdb.rpc.call import SERVICE
from kvdb.server.interceptors import UnaryCalls
from kvdb.server.service import handlers

ROOT = Path(__file__).parents[3]
PROTO = "proto/kvdb/rpc/kvdb.proto"


def test_the_generated_code_is_what_the_proto_says(tmp_path):
    pytest.importorskip("grpc_tools")
    command = ["-I", "proto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *command], cwd=ROOT, check=True)
    for fresh in (tmp_path / "kvdb/rpc").iterdir():
        assert (ROOT / "kvdb/rpc" / fresh.name).read_text() == fresh.read_text(), f"{fresh.name} is stale; run make proto"


def test_the_names_on_the_wire():
    assert SERVICE.full_name == "kvdb.v1.Kvdb"
    assert (f"/{SERVICE.full_name}/ImportContext", f"/{SERVICE.full_name}/Decode") == (METHOD, DECODE)


def test_every_call_is_served():
    served = handlers(None, UnaryCalls(None, None, None, None), None)
    assert served.service_name() == SERVICE.full_name
    for method in SERVICE.methods:
        details = type("Details", (), {"method": f"/{SERVICE.full_name}/{method.name}"})
        assert served.service(details).request_streaming == method.client_streaming
