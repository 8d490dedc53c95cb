"""Chunks for tests of sessions that are laid out of them."""

from dataclasses import replace

import pytest

from tests.kvdb.blend.oracle import ROPES, make_texts


@pytest.fixture
def spec(spec):
    """A small model whose keys can be moved."""
    return replace(spec, rope=ROPES["half"])


@pytest.fixture
def texts(spec):
    """Chunks of sizes that fill blocks and do not, computed from here and there."""
    return make_texts(spec)
