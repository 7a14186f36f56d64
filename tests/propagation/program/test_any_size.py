"""Sizes that differ between two traces become the sizes of tensors."""

import pytest
import torch
from torch import fx
from torch.fx.node import map_arg

from partway.propagation.graph.nodes import calls_of, has_any_strides, is_unsized
from partway.propagation.program.any_size import free_sizes, size_of
from partway.propagation.torch_internals import FakeTensorMode
from partway.strategy.errors import VerifyError

aten = torch.ops.aten


def graph_for(rows, write):
    """The graph that `write` makes of a tensor of [rows, 4], with local values."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((write(graph, x, rows),))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(rows, 4)
        for node in calls_of(graph):
            args = map_arg(node.args, lambda operand: operand.meta["val"])
            node.meta["val"] = node.target(*args)
    return graph


def expanded(graph, x, rows):
    """x and the sums of its columns, in as many rows."""
    total = graph.call_function(aten.sum.dim_IntList, (x, [0], True))
    wide = graph.call_function(aten.expand.default, (total, [rows, 4]))
    return graph.call_function(aten.add.Tensor, (x, wide))


def test_a_number_of_rows_becomes_the_size_of_a_tensor():
    one, other = graph_for(5, expanded), graph_for(6, expanded)
    free_sizes(one, other)
    (size,) = one.find_nodes(op="call_function", target=size_of)
    module = fx.GraphModule(torch.nn.Module(), one)
    assert size.args[1] == 0
    for rows in (0, 1, 9):
        assert module(torch.ones(rows, 4))[0].shape == (rows, 4)


def test_values_of_any_size_are_noted_and_so_are_their_strides():
    def transposed(graph, x, rows):
        return graph.call_function(aten.t.default, (x,))

    one, other = graph_for(5, transposed), graph_for(6, transposed)
    free_sizes(one, other)
    x, t, _ = one.nodes
    assert is_unsized(x)
    assert is_unsized(t)
    assert not has_any_strides(x)
    assert not has_any_strides(t)


def test_a_number_that_is_no_size_is_refused():
    def of_all(graph, x, rows):
        return graph.call_function(aten.mul.Tensor, (x, 3 * rows))

    message = r"aten.mul.Tensor mul_tensor takes 15, which depends on a number of rows of experts, and is no size of a"
    with pytest.raises(VerifyError, match=message):
        free_sizes(graph_for(5, of_all), graph_for(6, of_all))


def test_graphs_that_differ_in_more_than_sizes_are_refused():
    def by_rows(graph, x, rows):
        return graph.call_function(aten.neg.default if rows == 5 else aten.abs.default, (x,))

    with pytest.raises(VerifyError, match="depends on a number of rows"):
        free_sizes(graph_for(5, by_rows), graph_for(6, by_rows))
