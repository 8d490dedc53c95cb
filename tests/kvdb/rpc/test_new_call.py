"""A call is added to a copy of the packages, as CONTRIBUTING.md says, in five files; everything else comes from the table."""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import indexes._native
import kvdb._native

ROOT = Path(__file__).parents[3]
PACKAGES = ("engine_adapter", "kvdb", "query_optimizer", "indexes")
PROTO = "proto/kvdb/rpc/kvdb.proto"
GENERATED = {"kvdb/rpc/kvdb_pb2.py", "kvdb/rpc/kvdb_pb2.pyi"}
SECONDS_MAX = 120

BY_HAND = {
    PROTO: {
        "  // The first call of a client": """\
  rpc CountTokens(CountTokensRequest) returns (CountTokensReply);
""",
        "message HelloRequest {}": """\
message CountTokensRequest {
  string name = 1;
  uint64 times = 2;
}

message CountTokensReply {
  uint64 tokens = 1;
}

""",
    },
    "kvdb/rpc/calls.py": {
        '    WireCall("Hello"': """\
    WireCall("CountTokens", "count_tokens", group="maintain", repeated=True, tenant=Tenant.OWN),
"""
    },
    "kvdb/database/database.py": {
        "    @counted_call\n    def tiers(self)": """\
    @counted_call
    def count_tokens(self, name: str, times: int) -> int:
        return times * self._catalog.get(name).info().tokens

"""
    },
    "kvdb/client/client.py": {
        "    def tiers(self,": """\
    def count_tokens(self, name: str, times: int = 1, *, timeout: float | None = None) -> int:
        with deadlines.within(timeout):
            return self._transport.count_tokens(validate.name(name), times)

"""
    },
    "kvdb/commands/ls.py": {
        '    parser = add_command(commands, "drop"': """\
    add_contexts(add_command(commands, "count-tokens", "count the tokens of contexts", _count))
""",
        "def _list(given": """\
def _count(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        for name in given.names:
            print(db.count_tokens(name))
    return 0


""",
    },
}
"""What is to be written into each file: before what."""

USE = """
import asyncio, sys
from pathlib import Path
import numpy as np
import kvdb, kvdb.aio
from kvdb.__main__ import main
from kvdb.config import Config, ServerConfig
from kvdb.database import Database
from kvdb.rpc.options import REPEATED
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token

assert kvdb.__file__.startswith(sys.argv[1]), kvdb.__file__
spec = kvdb.ModelSpec("m", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
one = np.ones((1, 7, 16), np.float32)

async def counted(target, token):
    async with await kvdb.aio.connect(target, token=token) as db:
        return await db.count_tokens("doc", times=3)

with Database(Config()) as database:
    mine, others = new_token(Path("tokens.json"), "acme"), new_token(Path("tokens.json"), "globex")
    config = ServerConfig(host=f"unix:{sys.argv[1]}/socket", tokens_file="tokens.json", local_socket="")
    server = Server(database, config)
    server.start()
    with kvdb.connect(server.target, token=mine) as db, kvdb.connect(server.target, token=others) as other:
        db.import_context(spec, range(7), [(one, one)], name="doc")
        here = kvdb.Client(database).count_tokens("acme/doc")
        print(here, db.count_tokens("doc", 2), asyncio.run(counted(server.target, mine)))
        for call in (lambda: other.count_tokens("doc"), lambda: db.count_tokens("doc", timeout=1e-9)):
            try:
                call()
            except kvdb.KvdbError as error:
                print(type(error).__name__)
        assert main(["count-tokens", "doc", "--server", server.target, "--token", mine]) == 0
    server.stop(0)
assert "CountTokens" in REPEATED
"""


def test_a_call_is_five_files_by_hand(tmp_path):
    pytest.importorskip("grpc_tools")
    pytest.importorskip("greenlet")
    copy(tmp_path)
    for path, changes in BY_HAND.items():
        text = (tmp_path / path).read_text()
        for place, added in changes.items():
            assert text.count(place) == 1, (path, place)
            text = text.replace(place, added + place)
        (tmp_path / path).write_text(text)
    generate = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", "--python_out=.", "--pyi_out=.", PROTO]
    subprocess.run(generate, cwd=tmp_path, check=True)
    paths = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix in {".py", ".pyi", ".proto"}]
    assert changed(tmp_path, paths) == set(BY_HAND) | GENERATED
    assert len(BY_HAND) == 5
    assert used(tmp_path) == ["7 14 21", "NotFound", "DeadlineExceeded", "7"]


def changed(copied, paths):
    """The files of the copy that are not as they were, or were not there."""
    return {path for path in paths if not (ROOT / path).is_file() or not filecmp.cmp(ROOT / path, copied / path, shallow=False)}


def copy(to):
    """The packages with their compiled modules, and the contract."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__", "models", "native", "static"))
    for module in (kvdb._native, indexes._native):
        home = Path(module.__file__).parent
        for path in (*home.glob("_native*.so"), *home.glob("libkvdb*")):
            shutil.copy(path, to / home.name)
    (to / PROTO).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROTO, to / PROTO)


def used(copied):
    """The lines that a program prints which calls the copy in every way that there is."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copied), *packages])}
    command = [sys.executable, "-S", "-c", USE, str(copied)]  # without site an editable install does not come first
    done = subprocess.run(command, cwd=copied, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
