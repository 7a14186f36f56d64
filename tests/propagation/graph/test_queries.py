"""What is constant in a graph, what is differentiated, and where gradients flow."""

import operator

import torch
from torch import fx

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.graph import (
    constant_nodes,
    differentiated,
    gradient_flow,
    in_caches,
    may_return,
    without_gradients,
)
from partway.propagation.graph.nodes import operator_name


def test_what_depends_on_no_input_is_constant():
    graph = capture(lambda x: x + torch.arange(4).float().cos(), (torch.ones(4),), {})
    constant = constant_nodes(graph)
    assert [operator_name(node) in ("aten.add.Tensor",) for node in graph.nodes if node not in constant] == [True]


def test_a_loss_is_what_is_differentiated():
    weight = torch.ones(3, requires_grad=True)
    assert differentiated(capture(lambda x, w: ((x * w).sum(), x * w), (torch.ones(3), weight), {})) == (True, False)
    assert differentiated(capture(lambda x, w: (x * w, x * 2), (torch.ones(3), weight), {})) == (True, False)


def test_gradients_flow_between_parameters_and_the_loss_only():
    def fn(x, w):
        y = x.exp()
        return (y * w).sum(), (y * 2).sum()

    graph = capture(fn, (torch.ones(3), torch.ones(3, requires_grad=True)), {})
    assert {operator_name(v.node) for v in graph.differentiable if v.node.op != "placeholder"} == {
        "aten.mul.Tensor",
        "aten.sum.default",
    }
    flows = gradient_flow(graph, differentiated(graph))
    assert sorted(v.node.name for v in flows if v.node.op != "placeholder") == ["mul", "sum_1"]


def test_what_may_return_the_memory_of_an_operand():
    aten = torch.ops.aten

    def returns(*calls):
        graph = fx.Graph()
        value = node = graph.placeholder("x")
        for target, *more in calls:
            node = graph.call_function(target, (node, *more))
        graph.output((node,))
        return may_return(graph, value)

    assert returns()
    for target, *more in (
        (aten.view.default, [4]), (aten.split.Tensor, 2), (aten._unsafe_view.default, [4]), (aten.detach.default,),
        (aten.dropout.default, 0.5, False), (operator.getitem, 0), (torch.ops.partway.convert.default, "R", "S0"),
    ):  # fmt: skip
        assert returns((target, *more)), target
        assert returns((target, *more), (aten.t.default,))
        assert not returns((target, *more), (aten.clone.default,))
    assert not returns((aten.add.Tensor, 1), (aten.view.default, [4]))


class Cache:
    def __init__(self, keys):
        self.keys, self.length = keys, torch.zeros((), dtype=torch.long)


def test_what_is_returned_in_an_object_that_was_given_is_kept_for_the_next_call():
    class Kept:
        def __init__(self, found):
            self.found = found

    def fn(x, cache):
        made = Cache(cache.keys + x)
        return x * 2, made, Kept(x + 1), cache

    x = torch.ones(3, requires_grad=True)
    graph = capture(fn, (x, Cache(torch.ones(3))), {}, CaptureOptions(returns_given=True))
    assert in_caches(graph) == frozenset()
    alone = without_gradients(graph)
    assert not alone.differentiable
    assert in_caches(alone) == {"result[1]"}
    assert [port.name for port in alone.outputs] == ["result[0]", "result[1]", "result[2]", "result[3]"]
    keys, length = torch.zeros(3), torch.zeros((), dtype=torch.long)
    doubled, made, kept, cache = graph.result.build([1, 2, 3, 4], [x, keys, length])
    assert (doubled, made.keys, made.length, kept.found) == (1, 2, 3, 4)
    assert cache.keys is keys
    assert cache.length is length
