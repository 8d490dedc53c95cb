"""Memory for what is read from end to end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexes.arena import HUGE_PAGE, LINE, arrays_together, nbytes_together

sizes = st.lists(st.integers(0, 3 << 20), max_size=4)


@given(sizes)
def test_arrays_are_apart_zeroed_and_counted(counts):
    shapes = {str(i): ((count // 4, 4), np.uint8) for i, count in enumerate(counts)}
    arrays = arrays_together(shapes)
    for number, array in enumerate(arrays.values(), 1):
        assert not array.any()
        array[:] = number
    for number, (name, array) in enumerate(arrays.items(), 1):
        assert array.shape == shapes[name][0]
        assert array.ctypes.data % LINE == 0
        assert (array == number).all()
    nbytes = sum(array.nbytes for array in arrays.values())
    assert nbytes <= nbytes_together(shapes) <= 4 / 3 * (nbytes + LINE * len(shapes))


def test_arrays_keep_their_memory():
    array = arrays_together({"one": ((HUGE_PAGE,), np.uint8), "two": ((8,), np.float32)})["two"]
    array[:] = 3
    again = [arrays_together({"other": ((HUGE_PAGE,), np.uint8)})["other"] for _ in range(4)]
    for other in again:
        other[:] = 255
    assert (array == 3).all()
