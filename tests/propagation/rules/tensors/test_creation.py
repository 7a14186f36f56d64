"""Tensors made in the shape of another."""

import pytest
import torch
from expansions import check, randn

from partway.propagation.graph.port import Role


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.zeros_like(x) + x,
        lambda x: torch.ones_like(x, dtype=torch.float64) * x,
        lambda x: torch.full_like(x, 3.0) * x,
        lambda x: x.new_zeros(4, 3) + x,
        lambda x: x.new_ones(3) * x,
        lambda x: x.new_full((4, 1), 2.0) * x,
    ],
)
def test_a_constant_in_the_shape_of_a_tensor_does_not_depend_on_it(lab, fn):
    graph = check(lab, fn, randn(4, 3))
    (x,) = (port.node for port in graph.inputs if port.role is Role.INPUT)
    assert len(x.users) == 1
