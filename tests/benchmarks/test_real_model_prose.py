"""The novels come out of R's file of data as their lines."""

import importlib.util
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.architecture.source import ROOT

spec = importlib.util.spec_from_file_location("real_model_prose", ROOT / "scripts" / "real_model_prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


def serialised(lines):
    """A character vector as R writes it: XDR, version 3, native encoding UTF-8."""
    head = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">Ii", 16, len(lines))
    texts = [line.encode() for line in lines]
    return head + b"".join(struct.pack(">Ii", 0x40009, len(text)) + text for text in texts)


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8")), max_size=5), max_size=4))
def test_character_vectors_are_read_back(vectors):
    pieces = [serialised(lines) for lines in vectors]
    data = b"".join(struct.pack(">I", len(piece)) + zlib.compress(piece) for piece in pieces)
    assert list(prose.vectors(data)) == vectors


@pytest.mark.parametrize("kind", [(b"\x00\x00\x00\x10", b"\x00\x00\x00\x0d"), (b"\x00\x04\x00\x09", b"\x00\x00\x00\x13")])
def test_other_values_of_r_are_refused(kind):
    with pytest.raises(ValueError, match="expected"):
        prose.strings(serialised(["one"]).replace(*kind))


def test_lines_become_paragraphs():
    assert prose.paragraphs(["EMMA", "", "", "Emma Woodhouse,", "handsome", ""]) == "EMMA\n\nEmma Woodhouse, handsome\n"
