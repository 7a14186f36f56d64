"""Tensors made in the shape of another."""

import pytest
import torch
from expansions import check, randn

import partway as pw
from partway.propagation.graph.nodes import operands
from partway.propagation.graph.port import Role

aten = torch.ops.aten


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


def filled(empty):
    """A function that writes the halves of an empty tensor."""

    def fn(x):
        y = empty(x)
        y[:, :3] = x
        y[:, 3:] = 2 * x
        return y * y

    return fn


EMPTY = {
    "empty": lambda x: torch.empty(4, 6, dtype=x.dtype, device=x.device),
    "empty_like": lambda x: torch.empty_like(x.repeat(1, 2)),
    "empty_permuted": lambda x: torch.empty_permuted((4, 6), (1, 0), dtype=x.dtype, device=x.device),
    "empty_strided": lambda x: torch.empty_strided((4, 6), (1, 4), dtype=x.dtype, device=x.device),
    "new_empty": lambda x: x.new_empty(4, 6),
    "new_empty_strided": lambda x: x.new_empty_strided((4, 6), (12, 2)),
}


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_tensor_depends_on_none_and_is_written(lab, empty):
    graph = check(lab, filled(EMPTY[empty]), randn(4, 3))
    (made,) = (node for node in graph.nodes if "empty" in str(node.target))
    assert made.target is aten.empty.memory_format
    assert not operands(made)


@pytest.mark.parametrize("empty", EMPTY)
def test_what_is_written_into_an_empty_tensor_stays_split(empty):
    x = torch.empty(4, 3, device="meta", requires_grad=True)
    compiled = pw.compile(lambda x: filled(EMPTY[empty])(x).sum(), (x,), mesh={"dp": 4}, in_strategy=(("dp", None),))
    writes = [each for each in compiled.plan.operators if "slice_scatter" in each.operator]
    assert [str(each.results[0]) for each in writes] == ["('S0',)", "('S0',)"]
