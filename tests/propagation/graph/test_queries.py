"""What is constant in a graph, what is differentiated, and where gradients flow."""

import torch

from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import operator_name
from partway.propagation.graph.queries import constant_nodes, differentiated, gradient_flow


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
