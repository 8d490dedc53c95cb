"""Fixtures of the tests of the native module."""

import pytest

from kvdb import _native


@pytest.fixture(params=[*_native.isas(), *_native.emulated_isas()])
def isa(request):
    """Each instruction set that this machine has or can emulate; kernels run in it while the test does."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
