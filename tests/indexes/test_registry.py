"""The kinds of index by name, read while others are registered."""

from itertools import count

import pytest

import indexes.registry as registry
from indexes.flat import Flat
from tests.racing import race


@pytest.fixture
def kinds(monkeypatch):
    """Kinds of index that a test registers are forgotten at its end."""
    monkeypatch.setattr(registry, "KINDS", registry.Kinds(registry.KINDS.values()))


def test_kinds_are_gone_through_while_others_are_registered(kinds):
    numbers = count()

    def register():
        name = f"kind {next(numbers)}"
        assert registry.register(type("Other", (Flat,), {"kind": name})).kind in registry.KINDS

    race(register, lambda: [name for name in registry.KINDS if registry.is_priced(name)])
    assert list(registry.KINDS)[:2] == ["flat", "quantized"], "the built-in ones come first, the cheapest before all"


def test_threads_that_register_one_name_agree_on_its_class(kinds):
    won, lost = [], []

    def register():
        mine = type("Other", (Flat,), {"kind": "contested"})
        try:
            won.append(registry.register(mine))
        except registry.NoKind:
            lost.append(mine)

    race(register, register, seconds=0.05)
    assert won == [registry.KINDS["contested"]]
    assert lost
