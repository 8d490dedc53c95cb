"""What brings the tests' tensors to a card, tried without one."""

import torch
from triton.runtime.jit import JITFunction

from tests.kvdb.attention.triton.on_card import Mirror, launched_on

CPU = torch.device("cpu")


def test_views_of_one_slab_stay_views_of_one_slab():
    slab = torch.arange(64, dtype=torch.uint8)
    mirror = Mirror(CPU)
    floats, bytes_, part = mirror.of(slab.view(torch.float32)), mirror.of(slab), mirror.of(slab.view(8, 8)[2:, ::2])
    assert torch.equal(part, slab.view(8, 8)[2:, ::2])
    bytes_[16] = 99
    assert part[0, 0] == 99
    floats[0] = 1.0
    assert slab[16] == 16, "nothing is changed before it is copied back"
    mirror.back()
    assert slab[16] == 99
    assert slab.view(torch.float32)[0] == 1.0


def test_what_is_no_tensor_of_the_cpu_is_handed_on():
    mirror = Mirror(CPU)
    assert mirror.of(3) == 3
    meta = torch.empty(3, device="meta")
    assert mirror.of(meta) is meta


def test_a_launch_takes_copies_and_its_results_come_back(monkeypatch):
    taken = []

    def run(self, x, *, out):
        taken.append((x, out))
        out.copy_(2 * x)
        return "launched"

    monkeypatch.setattr(JITFunction, "run", run)
    x, out = torch.arange(3.0), torch.zeros(3)
    with launched_on(CPU):
        assert JITFunction.run(None, x, out=out) == "launched"
    assert torch.equal(out, torch.tensor([0.0, 2.0, 4.0]))
    assert all(mine is not given for mine, given in zip(taken[0], (x, out), strict=True))
    assert JITFunction.run is run
