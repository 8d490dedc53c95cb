"""Compares what observed queries showed."""

import numpy as np

from kvdb.attention.observation import Observation


def assert_same_observations(mine: list[Observation], theirs: list[Observation]) -> None:
    assert len(mine) == len(theirs)
    for native, python in zip(mine, theirs, strict=True):
        assert (native.seen is None) == (python.seen is None)
        assert native.seen is None or (native.seen == python.seen).all()
        known = slice(None) if native.seen is None else native.seen
        np.testing.assert_allclose(native.values[known], python.values[known], rtol=1e-3, atol=1e-5)
