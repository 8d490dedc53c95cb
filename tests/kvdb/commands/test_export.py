"""`kvdb export` and `kvdb import`, on a server and on a store; the files are read by the library of their format."""

import json

import numpy as np
import pytest

import kvdb
import kvdb.client.context_file as context_file
from kvdb.__main__ import main
from kvdb.types import DTYPES
from tests.kvdb.commands.offered import offered
from tests.reference import TOLERANCE, relative_error
from tests.stores import SPEC, connect, holds, kv_of, put

safetensors = pytest.importorskip("safetensors")
DOC = np.arange(150) % 50


@pytest.fixture(params=["server", "store"])
def place(request, tmp_path):
    """What --server takes, where "doc" and the chunk "chunk" are."""
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
        db.import_chunk(SPEC, DOC[:70], kv_of(DOC[:70]), name="chunk")
    with offered(tmp_path / "store", by=request.param) as target:
        yield target


@pytest.fixture
def run(place, capsys):
    """`run(*arguments)`: the status, and what was said."""

    def run(*arguments):
        status = main([*map(str, arguments), "--server", place])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def tensors(path):
    with safetensors.safe_open(path, "numpy") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def test_a_context_goes_out_and_comes_back(run, place, tmp_path):
    path = tmp_path / "doc.safetensors"
    status, said = run("export", "doc", path, "--json")
    assert (status, json.loads(said)["tokens"]) == (0, len(DOC))
    found, metadata = tensors(path)
    assert found["tokens"].tolist() == DOC.tolist()
    for layer, (k, v) in enumerate(kv_of(DOC)):
        assert np.array_equal(found[f"layers.{layer}.k"], k)
        assert np.array_equal(found[f"layers.{layer}.v"], v)
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest == json.loads(metadata["kvdb"])
    assert kvdb.ModelSpec.from_dict(manifest["spec"]) == SPEC
    assert run("import", path)[1].startswith("kvdb: a context named 'doc' is stored already")
    assert run("drop", "doc")[0] == 0
    assert run("import", path) == (0, "'doc': 150 tokens are stored\n")
    assert run("import", path, "--name", "again")[0] == 0
    with kvdb.connect(place) if "://" in place else connect(place) as db:
        assert holds(db, DOC)


def test_a_chunk_stays_one(run, place, tmp_path):
    assert run("export", "chunk", tmp_path / "c.safetensors")[0] == 0
    run("drop", "chunk")
    assert run("import", tmp_path / "c.safetensors")[0] == 0
    assert json.loads(run("show", "chunk", "--json")[1])["chunk"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_dtype_keeps_its_bits(dtype, tmp_path):
    spec = kvdb.ModelSpec("m", layers=1, q_heads=2, kv_heads=2, head_dim=16, dtype=dtype)
    k, v = np.random.default_rng(3).standard_normal((2, 2, 70, 16)).astype(DTYPES[dtype])
    with connect(tmp_path / "store") as db:
        context_file.write(db.import_context(spec, np.arange(70), [(k, v)], name="doc"), tmp_path / "d.safetensors")
    with connect(tmp_path / "other") as db:
        found = context_file.store(db, tmp_path / "d.safetensors").read(0)
        assert found[0].tobytes() == k.tobytes()
        assert found[1].tobytes() == v.tobytes()
    if dtype != "bfloat16":  # numpy has none
        assert tensors(tmp_path / "d.safetensors")[0]["layers.0.k"].dtype == DTYPES[dtype]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def longer(path):
    path.write_bytes(path.read_bytes() + b"x")


def no_header(path):
    path.write_bytes(b"\xff" * 64)


def empty(path):
    path.write_bytes(b"")


def newer(path):
    path.write_bytes(path.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 9'))


@pytest.mark.parametrize("fault", [cut_short, longer, no_header, empty, newer])
def test_another_file_is_refused_in_one_line(fault, tmp_path, capsys):
    with connect(tmp_path / "store") as db:
        put(db, DOC, "doc")
    path, place = tmp_path / "doc.safetensors", str(tmp_path / "store")
    assert main(["export", "doc", str(path), "--server", place]) == 0
    fault(path)
    capsys.readouterr()
    assert main(["import", str(path), "--name", "other", "--server", place]) == (1 if fault is newer else 7)
    said = capsys.readouterr().err
    assert said.startswith("kvdb: ")
    assert said.count("\n") == 1
    assert "version 9" in said or fault is not newer


def test_what_cannot_be_exported_is_told(run, tmp_path):
    assert "expected a name that does" in run("export", "doc", tmp_path / "doc.bin")[1]
    run("export", "doc", tmp_path / "doc.safetensors")
    assert run("export", "doc", tmp_path / "doc.safetensors")[0] == 1, "a file that is there is kept"
    assert run("export", "none", tmp_path / "none.safetensors")[0] == 3


def answers(session):
    """Attention of one more token in every layer of a session."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((heads, 1, SPEC.head_dim)).astype(np.float32) for heads in (SPEC.q_heads, 1, 1))
    with session:
        return [session.attend(layer, q, k, v, retrieval=kvdb.Exact()) for layer in range(SPEC.layers)]


def test_what_is_not_exact_goes_out_as_attention_sees_it_and_comes_back(run, place, tmp_path):
    ids, rng = np.r_[DOC[:70], DOC[:70]], np.random.default_rng(3)
    with kvdb.connect(place) as db:
        with db.create_session(SPEC, parts=["chunk", "chunk"]) as session:
            for layer in range(SPEC.layers):  # recomputed tokens mask what is stored of them
                k, v = rng.standard_normal((2, SPEC.kv_heads, 5, SPEC.head_dim)).astype(np.float32)
                session.overlay(layer, np.arange(75, 80), k, v)
            session.store("blend")
        expected = answers(db.create_session(SPEC, parts=["blend"]))
        told = db.get("blend").info
        assert not told.exact
    status, said = run("export", "blend", tmp_path / "blend.safetensors")
    assert status == 0, said
    assert json.loads((tmp_path / "blend.json").read_text())["exact"] is False
    assert run("import", tmp_path / "blend.safetensors", "--name", "back")[0] == 0
    with kvdb.connect(place) as db:
        back = db.get("back")
        assert back.info.metadata == {"exact": False}
        assert (back.token_ids() == ids).all()
        for got, want in zip(answers(back.create_session(ids)), expected, strict=True):
            assert relative_error(got, want) < TOLERANCE["float32"]
        assert db.match(SPEC, ids).tokens < 140, "no prompt of these tokens takes it for theirs"


def test_a_disk_that_becomes_full_leaves_no_file_behind(tmp_path):
    """Also where the room ends within the manifest."""
    path = tmp_path / "doc.safetensors"
    path.with_suffix(".json").symlink_to("/dev/full")
    with connect(None) as db:
        put(db, DOC, "doc")
        with pytest.raises(OSError, match="No space left"):
            context_file.write(db.get("doc"), path)
    assert not list(tmp_path.iterdir())
