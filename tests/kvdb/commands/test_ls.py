"""`kvdb ls`, `kvdb show`, `kvdb pin` and its like, `kvdb drop` and `kvdb offload`, on a server and on a store."""

import json

import numpy as np
import pytest

import kvdb
from kvdb.__main__ import main
from tests.kvdb.commands.offered import offered
from tests.stores import SPEC, connect, names, put

DOC = np.arange(100) % 50


@pytest.fixture(params=["server", "store"])
def place(request, tmp_path):
    """Where three contexts are: what --server takes."""
    with connect(tmp_path / "store") as db:
        put(db, DOC, "contract")
        put(db, np.r_[DOC[:60], 1, 2], "contract/2")
        db.import_chunk(SPEC, DOC[::-1], [(np.zeros((1, 100, 16), np.float32),) * 2] * 2, name="größe")
    with offered(tmp_path / "store", by=request.param) as target:
        yield target


@pytest.fixture
def run(place, capsys):
    """`run(*arguments)`: the status, and the lines that were printed."""

    def run(*arguments):
        status = main([*arguments, "--server", place])
        said = capsys.readouterr()
        return status, (said.out + said.err).splitlines()

    return run


def test_contexts_are_listed(run):
    status, lines = run("ls")
    assert status == 0
    titles = ["name", "model", "tokens", "segments", "MiB", "uses", "used", "kind", "kept"]
    assert lines[0].split() == titles
    assert [line.split()[:6] + line.split()[7:] for line in lines[1:-1]] == [
        ["contract", "model", "100", "1", "0.0", "1", "chunk"],
        ["contract/2", "model", "62", "2", "0.0", "0", "chunk"],
        ["größe", "model", "100", "1", "0.0", "0", "chunk"],
    ]
    assert lines[-1] == "in all 262 tokens; what contexts share counts for each of them"
    assert [line.split()[0] for line in run("ls", "contract/")[1]] == ["name", "contract/2", "in"]
    assert run("ls", "x") == (0, ["no context begins with 'x'"])
    fields = [json.loads(line) for line in run("ls", "--json")[1]]
    assert [(one["name"], one["tokens"], one["kind"]) for one in fields][2] == ("größe", 100, "chunk")
    assert kvdb.ModelSpec.from_dict(fields[0]["spec"]) == SPEC


def test_a_context_is_shown(run):
    status, lines = run("show", "contract", "größe")
    assert status == 0
    assert lines[0] == "'contract': 100 tokens, chunk, segments: 1, 0.0 MiB"
    assert lines[1].strip() == f"of {SPEC}"
    assert json.loads(run("show", "contract", "--json")[1][0])["indexes"] == []
    assert run("show", "none")[0] == 3


def test_contexts_are_kept(run):
    assert run("pin", "contract", "größe") == (0, ["'contract' is pinned", "'größe' is pinned"])
    assert run("unpin", "größe") == (0, ["'größe' is pinned no more"])
    told = """'contract' is kept for a time, with {"source": "größe"}"""
    assert run("update", "contract", "--ttl", "7201", "--metadata", '{"source": "größe"}') == (0, [told])
    assert run("rename", "contract/2", "other") == (0, ["'contract/2' is 'other' from now on"])
    status, lines = run("ls", "--metadata", '{"source": "größe"}')
    assert status == 0
    assert lines[1].endswith("chunk  pinned, for 2h")
    assert len(lines) == 3
    shown = run("show", "contract")[1]
    assert shown[3:] == ["  kept: pinned, for 2h", '  noted: {"source": "größe"}']
    assert run("ls", "--metadata", '{"source": 1}') == (0, ["no context is stored and has that metadata"])
    fields = [json.loads(line) for line in run("ls", "--json")[1]]
    assert [(one["name"], one["pinned"], one["metadata"]) for one in fields] == [
        ("contract", True, {"source": "größe"}),
        ("größe", False, {}),
        ("other", False, {}),
    ]


@pytest.mark.parametrize("wrong", [["--ttl", "0"], ["--ttl", "soon"], ["--metadata", "[]"], ["--metadata", "{"]])
def test_what_cannot_be_is_refused(run, wrong, capsys):
    with pytest.raises(SystemExit):
        run("update", "contract", *wrong)
    assert "usage" in capsys.readouterr().err


def test_contexts_are_dropped(run):
    assert run("drop", "contract", "größe") == (0, ["'contract' is forgotten", "'größe' is forgotten"])
    assert len(run("ls")[1]) == 3
    status, lines = run("drop", "contract")
    assert status == 3
    assert "no context is named 'contract'" in lines[0]
    run("drop", "contract/2")
    assert run("ls") == (0, ["no context is stored"])


def test_contexts_are_offloaded(run):
    assert run("offload", "contract") == (0, ["'contract': 0.0 MiB of main memory are free again"])


def test_a_folder_that_is_not_there_is_not_made(tmp_path, capsys):
    assert main(["ls", "--server", str(tmp_path / "typo")]) == 3
    assert "no store is at" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_open_is_told(tmp_path, capsys):
    with connect(tmp_path) as db:
        put(db, DOC, "doc")
        assert main(["ls", "--server", str(tmp_path)]) == 4
        assert "is open already, in this very process" in capsys.readouterr().err
        assert names(db) == ["doc"]


def test_contexts_that_match_are_dropped_by_one_call(run):
    assert run("drop", "--prefix", "contract")[1] == ["'contract' is forgotten", "'contract/2' is forgotten"]
    assert run("drop", "--prefix", "contract") == (0, ["no context matches"])
    assert run("drop", "größe", "--prefix", "g")[0] == 2
    assert run("drop")[0] == 2


def test_none_is_dropped_where_a_name_is_wrong(run):
    assert run("drop", "contract", "no such")[0] == 3
    assert len(run("ls")[1]) == 5
