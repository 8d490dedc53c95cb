"""Fixtures of the tests of indexes."""

import pytest

from indexes import _native


@pytest.fixture(params=_native.isas())
def isa(request):
    """Each instruction set that this machine has; kernels run in it while the test does."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
