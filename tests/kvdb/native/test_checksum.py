"""CRC-32C is that of RFC 3720, whatever the length, the place and the instruction set."""

import numpy as np
import pytest

from kvdb import _native

ISAS = _native.isas()


@pytest.fixture(params=ISAS)
def isa(request):
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def crc32c(data, count, nbytes, gap=0):
    table = np.uint64(data.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(nbytes + gap)
    out = np.full(count, 123, np.uint32)
    _native.crc32c(table, nbytes, out)
    return out.tolist()


def bitwise(data):
    """The definition, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_it_gives_the_values_of_the_standard(isa, data, expected):
    assert crc32c(np.frombuffer(data or b"\0", np.uint8), 1, len(data)) == [expected]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 129])
def test_it_sums_any_number_of_blocks_of_any_length_at_any_place(isa, count, nbytes):
    data = np.random.default_rng(count + nbytes).integers(0, 256, 1 + count * (nbytes + 3), dtype=np.uint8)[1:]
    expected = [bitwise(data[i * (nbytes + 3) :][:nbytes].tobytes()) for i in range(count)]
    assert crc32c(data, count, nbytes, gap=3) == expected


def test_what_does_not_fit_is_refused():
    table, out = np.zeros(2, np.uint64), np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="nbytes is -1"):
        _native.crc32c(table, -1, out)
    with pytest.raises(ValueError, match=r"out has shape \[1\]; expected one element for each of 2 blocks"):
        _native.crc32c(table, 0, out[:1])
    with pytest.raises(TypeError):
        _native.crc32c(table, 0, out.astype(np.int64))
