"""What real cards would run: nothing spills, and keys and values come by asynchronous copies of 16 bytes."""

import json
import os
import subprocess
import sys

import pytest

from tests.kvdb.attention.triton.specimens import SPECIMENS

SHARED_MAX = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have on these cards (CUDA C++ Programming Guide, technical specifications)."""


@pytest.fixture(scope="module")
def compiled():
    """What `tests.kvdb.attention.triton.compiled` prints for each card, in a process without the interpreter."""
    own = {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    command = [sys.executable, "-m", "tests.kvdb.attention.triton.compiled", *map(str, SHARED_MAX)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    return {card: [line for line in lines if line["card"] == card] for card in SHARED_MAX}


@pytest.mark.parametrize("card", SHARED_MAX)
def test_kernels_compile_spill_nothing_and_find_room(compiled, card):
    lines = compiled[card]
    assert {line["specimen"] for line in lines} == {name for name, specimen in SPECIMENS.items() if card in specimen.cards}
    assert not [line for line in lines if line["spilled"]]
    assert not [line for line in lines if line["shared"] > SHARED_MAX[card]]


@pytest.mark.parametrize("card", SHARED_MAX)
def test_keys_and_values_are_copied_16_bytes_at_a_time_while_others_are_attended(compiled, card):
    for line in compiled[card]:
        if (widths := SPECIMENS[line["specimen"]].copies) is not None:
            assert line["copies"], line
            assert (max(line["copies"]), min(line["copies"])) == widths, line
