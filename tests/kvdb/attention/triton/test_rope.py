"""Rotation of rows against complex multiplication in float64."""

import pytest
import torch

from kvdb.attention.triton.rope import rotate
from tests.kvdb.attention.triton.reference import DEVICE, error, rotated


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(128, 64), (80, 16), (24, 12), (8, 0), (256, 3)])
@pytest.mark.parametrize("own", [False, True], ids=["one angle", "an angle a token"])
def test_rows_are_turned_and_the_rest_stays(interleaved, head_dim, pairs, own):
    x, angle = random(2, 3, 7, head_dim), random(7, pairs, seed=1) if own else random(pairs, seed=1)
    out = torch.full_like(x, torch.nan)
    rotate(x, angle.cos(), angle.sin(), interleaved, out)
    assert error(out, rotated(x, angle.cos(), angle.sin(), interleaved)) < 1e-6
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_once_and_works_in_place(dtype):
    x, angle = random(5, 32).to(dtype), random(5, 16, seed=1)
    right = rotated(x, angle.cos(), angle.sin(), False)
    rotate(x, angle.cos(), angle.sin(), False, x)
    assert x.dtype == dtype
    assert (x.double() - right).abs().max() <= right.abs().max() * torch.finfo(dtype).eps


def test_turning_there_and_back_is_nothing_and_many_rows_take_many_programs():
    x, angle = random(1000, 16), random(1000, 8, seed=1)
    there, back = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    rotate(x, angle.cos(), angle.sin(), True, there)
    rotate(there, angle.cos(), -angle.sin(), True, back)
    assert error(back, x.double()) < 1e-6
    rotate(x[:0], angle[:0].cos(), angle[:0].sin(), True, back[:0])


@pytest.mark.parametrize("shape", [(4,), (3, 2), (5, 5)])
def test_angles_that_do_not_fit_are_refused(shape):
    x, angle = random(5, 6), random(*shape)
    with pytest.raises(ValueError, match="cos is"):
        rotate(x, angle, angle, False, x.clone())
    with pytest.raises(ValueError, match="x is"):
        rotate(x, random(3), random(3), False, x[:2].clone())
