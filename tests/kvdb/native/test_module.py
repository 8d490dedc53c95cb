"""What every call checks, which instruction set and threads it uses, and that it may be called from anywhere."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvdb import _native
from tests.kvdb.native.blocks import Blocks, bits, random
from tests.kvdb.native.moved import Moved
from tests.reference import attention, relative_error


def run(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64, 64), "kv_heads is 0; expected at least 1"),
        ((1, 12, 64), "head_dim is 12; expected a multiple of 8 up to 640"),
        ((1, 648, 64), "head_dim is 648"),
        ((1, 64, 0), "block_size is 0; expected 1 to 1024"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _native.Geometry(_native.Dtype.float32, *arguments)


def test_a_geometry_tells_its_bytes():
    geometry = _native.Geometry(_native.Dtype.bfloat16, 8, 128)
    assert (geometry.block_size, geometry.block_bytes) == (64, 2 * 8 * 64 * 128 * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((2, 1, 8), np.float32)}, r"q has shape \[2, 1, 8\]; expected \[2, 1, 16\]"),
        ({"q": np.zeros((2, 1, 16), np.float32)}, r"out has shape \[4, 1, 16\]; expected \[2, 1, 16\]"),
        ({"q": np.zeros((3, 1, 16), np.float32)}, "q has 3 heads; expected a multiple of the 2 KV heads"),
        ({"q": np.zeros((4, 1, 16), np.uint16)}, "q has the wrong type; expected float32"),
        ({"q": np.zeros((4, 16), np.float32)}, "q has shape"),
        ({"out": np.zeros((4, 1, 32), np.float32)[:, :, ::2]}, "out has stride 2 in its last dimension"),
        ({"out": np.zeros((4, 2, 16), np.float32)}, "out has shape"),
        ({"counts": np.zeros(3, np.int32)}, "counts has 3 elements; expected one for each of 2 blocks"),
        ({"counts": np.array([4, 9], np.int32)}, r"counts\[1\] is 9; a block of this geometry holds 0 to 8"),
        ({"counts": np.array([-1, 8], np.int32)}, r"counts\[0\] is -1"),
        ({"causal": 2}, "causal is 2; expected 0 or the number of queries, 1"),
        ({"causal": 1, "counts": np.zeros(2, np.int32)}, "causal is 1, more than the run's 0 tokens"),
        ({"lse": np.zeros((4, 2), np.float32)}, "lse has shape"),
    ],
)
def test_attend_refuses_what_does_not_fit(changes, message):
    blocks = Blocks("float32", 2, 16, 8, 2)
    blocks.memory[:] = 0
    arguments = {
        "q": np.zeros((4, 1, 16), np.float32),
        "table": blocks.table,
        "counts": np.full(2, 8, np.int32),
        "causal": 0,
        "scale": 1.0,
        "out": np.zeros((4, 1, 16), np.float32),
        "lse": None,
    }
    _native.attend(blocks.geometry, **arguments)
    with pytest.raises(ValueError, match=message):
        _native.attend(blocks.geometry, **(arguments | changes))


def test_positions_outside_the_table_are_refused():
    blocks = Blocks("float32", 1, 8, 4, 2)
    k = np.zeros((1, 3, 8), np.float32)
    for start in (6, -1, 2**62):
        with pytest.raises(ValueError, match="do not lie in the table's"):
            blocks.write(start, k, k)
    with pytest.raises(ValueError, match="copy: destination"):
        _native.copy(blocks.geometry, blocks.table, 0, blocks.table, 7, 3)


def some_moved():
    return Moved.of("float32", 2, 16, 70, [70, 30, 70], [0, 1, -1], views=2, pairs=8, hidden=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"view": np.array([0, 2], np.int32)}, r"view\[1\] is 2; expected -1, or one of the 2 views"),
        ({"view": np.array([-2], np.int32)}, r"view\[0\] is -2"),
        ({"sin": np.zeros((2, 7), np.float32)}, r"sin has shape \[2, 7\]; expected that of cos, \[2, 8\]"),
        ({"sin": np.zeros((1, 8), np.float32)}, "sin has shape"),
        ({name: np.zeros((2, 321), np.float32) for name in ("cos", "sin")}, "angles of 321 pairs; expected 320 at most"),
        ({"hidden": np.zeros((2, 2), np.uint64)}, r"hidden has shape \[2, 2\]; expected \[3, "),
        ({"hidden": np.zeros((3, 0), np.uint64)}, "hidden has shape"),
        ({"hidden": np.zeros((3, 17), np.uint64)}, "hidden has shape"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(changes, message):
    moved = some_moved()
    given = {"view": moved.view, "cos": moved.cos, "sin": moved.sin, "interleaved": False, "hidden": None}
    assert _native.Placement(**given).blocks == 3
    with pytest.raises(ValueError, match=message):
        _native.Placement(**(given | changes))
    with pytest.raises(TypeError):
        _native.Placement(**(given | {"view": np.zeros((3, 1), np.int32)}))
    with pytest.raises(TypeError):
        _native.Placement(**(given | {"cos": moved.cos[0], "sin": None}))


def test_attend_refuses_a_placement_or_ends_that_do_not_fit():
    moved, q = some_moved(), np.ones((4, 3, 16), np.float32)
    wide = np.zeros((2, 9), np.float32)
    for changes, message in [
        ({"view": np.zeros(4, np.int32)}, "placement is of 4 blocks; the run has 3"),
        ({"cos": wide, "sin": wide}, "angles of 9 pairs; expected at most half the head dimension, 16"),
        ({"hidden": np.zeros((3, 1), np.uint64)}, "by 1 words for each block; expected 2 for blocks of 70 tokens"),
    ]:
        given = {"view": moved.view, "cos": moved.cos, "sin": moved.sin, "interleaved": False, "hidden": None} | changes
        moved.placement = lambda given=given: _native.Placement(**given)
        with pytest.raises(ValueError, match=message):
            moved.attend(q, 1.0)
    for ends, message in [
        ([0, 1], "ends has 2 elements; expected one for each of 3 queries"),
        ([0, 2, 1], "expected them to rise"),
        ([-1, 0, 1], "ends run from -1 to 1"),
        ([0, 0, 171], "to the run's 170 tokens at most"),
    ]:
        with pytest.raises(ValueError, match=message):
            moved.attend(q, 1.0, ends=np.array(ends), placement=False)
    with pytest.raises(ValueError, match="ends are given, and causal is not 0"):
        moved.attend(q, 1.0, ends=np.array([0, 1, 2]), causal=3, placement=False)
    for ends in ("012", np.zeros((1, 3), np.int64)):
        with pytest.raises(TypeError):
            moved.attend(q, 1.0, ends=ends, placement=False)


def test_moves_refuse_what_does_not_fit():
    blocks = Blocks("float32", 1, 16, 4, 2)
    g, t, k = blocks.geometry, blocks.table, np.zeros((1, 2, 16), np.float32)
    cos = np.ones(8, np.float32)
    for call, message in [
        (lambda: _native.place(g, t, 7, t, 0, 2, cos, cos), "place: source"),
        (lambda: _native.place(g, t, 0, t, -1, 2, cos, cos), "place: target"),
        (lambda: _native.place(g, t, 0, t, 4, (1 << 63) - 1, cos, cos), "place: source"),
        (lambda: _native.place(g, t, 0, t, 4, 2, cos, None), "both, or neither"),
        (lambda: _native.place(g, t, 0, t, 4, 2, cos, cos[:7]), r"sin has shape \[7\]; expected that of cos, \[8\]"),
        (lambda: _native.place(g, t, 0, t, 4, 2, np.ones(9, np.float32), np.ones(9, np.float32)), "angles of 9 pairs"),
        (lambda: _native.scatter(g, t, 7, t, np.array([0, 1])), "scatter: source"),
        (
            lambda: _native.scatter(g, t, 0, t, np.array([0, 8])),
            r"positions\[1\] is 8, which does not lie in the table's \[0, 8\)",
        ),
        (lambda: _native.scatter(g, t, 0, t, np.array([-1])), r"positions\[0\] is -1"),
        (lambda: _native.gather_at(g, t, np.array([0, 8]), k, k.copy()), "gather_at: "),
        (
            lambda: _native.gather_at(g, t, np.array([0, 1, 2]), k, k.copy()),
            r"k_out has shape \[1, 2, 16\]; expected \[1, 3, 16\]",
        ),
        (lambda: _native.rotate(g, k, cos, cos[:7], False, k), "sin has shape"),
        (lambda: _native.rotate(g, k.astype(np.uint16), cos, cos, False, k), "q has the wrong type"),
        (lambda: _native.rotate(g, k, cos, cos, False, np.zeros((1, 3, 16), np.float32)), "out has shape"),
        (lambda: _native.rotate(g, k[0], cos, cos, False, k), "q has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError):
        _native.rotate(g, k, cos[None], cos, False, k)
    with pytest.raises(TypeError):
        _native.scatter(g, t, 0, t, None)


def test_a_read_only_output_is_refused():
    blocks = Blocks("float32", 1, 8, 4, 1)
    k = np.zeros((1, 3, 8), np.float32)
    k.flags.writeable = False
    with pytest.raises(TypeError):
        _native.gather(blocks.geometry, blocks.table, 0, 3, k, k)


def test_portable_code_is_always_there():
    assert _native.isas()[-1] == "portable"
    assert _native.isa() in _native.isas()


def test_tiles_are_offered_where_the_processor_has_them_and_emulated_ones_never():
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("amx" in _native.isas()) <= (" amx_bf16" in flags)
    assert not set(_native.emulated_isas()) & {*_native.isas(), *_native.variants(), *_native.kernels().values()}


def test_the_environment_chooses():
    show = "from kvdb import _native; print(_native.isa(), _native.threads())"
    assert run(show, KVDB_ISA="portable", KVDB_THREADS="3").stdout.split() == ["portable", "3"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"KVDB_ISA": "sse9"}, "KVDB_ISA: 'sse9' is not an instruction set that this machine can run; use one of"),
        ({"KVDB_THREADS": "many"}, "KVDB_THREADS is 'many'; expected a number of threads"),
        ({"KVDB_THREADS": "0"}, "KVDB_THREADS is 0; expected 1 to 1024"),
    ],
)
def test_a_wrong_environment_fails_at_import(environment, message):
    result = run("from kvdb import _native", **environment)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert message in result.stderr


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="isa: 'sse9' is not an instruction set"):
        _native.set_isa("sse9")
    with pytest.raises(ValueError, match="threads is 0; expected 1 to 1024"):
        _native.set_threads(0)


@pytest.fixture
def large():
    """A run that is worth several threads, and the answer to a query over it."""
    counts = np.full(40, 64, np.int32)
    blocks = Blocks("float32", 4, 64, 64, 40)
    k, v = random((4, 2560, 64), "float32", 0), random((4, 2560, 64), "float32", 1)
    assert blocks.write(0, k, v) is None
    q = random((8, 1, 64), "float32", 2)
    expected = attention(q, k, v, 0.125)[0]

    def is_right():
        out = np.zeros_like(q)
        _native.attend(blocks.geometry, q, blocks.table, counts, 0, 0.125, out)
        return relative_error(out, expected) < 1e-5

    return is_right


def test_many_threads_may_call_at_once(large):
    before = _native.threads()
    _native.set_threads(4)
    answers = []

    def work():
        answers.extend(large() for _ in range(50))

    try:
        workers = [threading.Thread(target=work) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        _native.set_threads(before)
    assert len(answers) == 300
    assert all(answers)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(large):
    before = _native.threads()
    _native.set_threads(2)
    try:
        assert large()
        child = os.fork()
        if child == 0:
            os._exit(0 if all(large() for _ in range(20)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert large()
    finally:
        _native.set_threads(before)


def test_torch_tensors_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    blocks = Blocks("bfloat16", 2, 16, 8, 2)
    k = torch.randn(10, 2, 16).bfloat16().transpose(0, 1).view(torch.uint16)
    assert _native.append(blocks.geometry, blocks.table, 3, k, k) is None
    assert np.array_equal(bits(blocks.read(3, 10)[0]), k.numpy())
