"""Where there is a card and kernels are compiled for it, they are launched on it."""

from collections.abc import Iterator

import pytest
import torch

from kvdb.attention.triton.pages import INTERPRETED
from tests.kvdb.attention.triton import reference
from tests.kvdb.attention.triton.interpreter import speed_up
from tests.kvdb.attention.triton.on_card import ROUNDING, launched_on

speed_up()
ON_CARD = torch.cuda.is_available() and not INTERPRETED

if ON_CARD:  # before the tests import it
    exactly = reference.error
    reference.error = lambda got, expected: max(0.0, exactly(got, expected) - ROUNDING)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    if not ON_CARD:
        yield
        return
    with launched_on(torch.device("cuda")):
        yield
