"""A disk that fails to read the catalogue is told from a catalogue that was damaged."""

import shutil
import subprocess
import sys

import pytest

import kvdb
from kvdb.errors import IntegrityError

OPEN = """
import sys
import kvdb

try:
    kvdb.connect(sys.argv[1]).close()
except kvdb.KvdbError as error:
    print(type(error).__name__, error)
"""
READS_OF_ITS_HEADER = 3


@pytest.fixture
def store(tmp_path, spec, make_kv):
    path = tmp_path / "store"
    kv = make_kv(spec, 10)
    with kvdb.connect(path) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    return path


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("failing", [str(READS_OF_ITS_HEADER + 1), f"{READS_OF_ITS_HEADER + 1}+"])
def test_a_read_that_fails_is_no_damage(store, tmp_path, failing):
    catalog, trace = store / "catalog.db", tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(trace), "-P", str(catalog)]
    strace += ["-e", "trace=read,pread64", "-e", f"inject=read,pread64:error=EIO:when={failing}"]
    done = subprocess.run([*strace, sys.executable, "-c", OPEN, str(store)], capture_output=True, text=True, check=False)
    if "(INJECTED)" not in (trace.read_text() if trace.exists() else ""):
        pytest.skip(f"strace cannot let a read fail here: {done.stderr.strip()}")
    assert done.stdout.startswith(f"Unavailable {catalog} cannot be used: "), done
    with kvdb.connect(store) as db:
        assert [info.name for info in db.contexts()] == ["doc"]


def test_damage_is_told_as_damage(store):
    catalog = store / "catalog.db"
    page = 4096
    content = bytearray(catalog.read_bytes())
    content[2 * page :] = b"\x55" * (len(content) - 2 * page)
    catalog.write_bytes(content)
    with pytest.raises(IntegrityError, match="was damaged"):
        kvdb.connect(store)
    assert catalog.read_bytes() == content
