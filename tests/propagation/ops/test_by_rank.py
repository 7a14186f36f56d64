"""The operators whose result depends on which part of a dim a rank has, by themselves."""

import pytest
import torch

from partway.propagation.ops.by_rank import of_rank, part_slice


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_rank_gets_its_own_numbers(dtype):
    values = [float(i) for i in range(6)]
    for place in range(3):
        found = of_rank(torch.ones(2), torch.tensor(place), values, 2, dtype)
        assert torch.equal(found, torch.tensor(values[2 * place : 2 * place + 2], dtype=dtype))


def test_a_rank_takes_its_slice_and_gives_the_gradient_back():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    for place, start in enumerate([0, 3, 2]):
        found = part_slice(x, torch.tensor(place), 1, [0, 3, 2], 4)
        assert torch.equal(found, x[:, start : start + 4])
        assert found.is_contiguous()
        weight = torch.randn(3, 4, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(found, x, weight)
        (expected,) = torch.autograd.grad(x[:, start : start + 4], x, weight)
        assert torch.equal(gradient, expected)


def test_they_behave_as_their_fake_forms_say():
    x = torch.randn(2, 5, requires_grad=True)
    place = torch.tensor(1)
    torch.library.opcheck(part_slice, (x, place, 1, [0, 2], 3))
    torch.library.opcheck(of_rank, (x.detach(), place, [1.0, 2.0, 3.0, 4.0], 2, torch.int64))
