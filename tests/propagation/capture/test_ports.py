"""The inputs and outputs of a captured function: their roles and names."""

import pytest
import torch
from torch import fx, nn

from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import operator_name
from partway.propagation.graph.port import Role
from partway.strategy import CaptureError


def names(graph, role):
    return [port.name for port in graph.inputs if port.role is role]


def run(graph, **tensors):
    """The outputs of a captured graph, its inputs given by name."""
    given = {**graph.constants, **tensors}
    return fx.Interpreter(graph.module).run(*(given[port.name] for port in graph.inputs))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += 1
        return self.head(self.embed(ids)) * self.scale


def test_a_tied_weight_is_one_input_with_two_names():
    graph = capture(Tied(), (torch.tensor([1, 2]),), {})
    assert names(graph, Role.PARAMETER) == ["embed.weight"]
    assert graph.aliases == {"head.weight": "embed.weight"}
    (port,) = (port for port in graph.inputs if port.role is Role.PARAMETER)
    assert sorted(operator_name(user) for user in port.node.users) == ["aten.embedding.default", "aten.linear.default"]


def test_buffers_are_inputs_and_what_is_written_to_them_is_an_output():
    module = Tied()
    graph = capture(module, (torch.tensor([1, 2]),), {})
    assert names(graph, Role.BUFFER) == ["scale", "seen"]
    assert [(port.role, port.name) for port in graph.outputs] == [(Role.BUFFER_UPDATE, "seen"), (Role.RESULT, "result")]
    assert module.seen == 0


def test_a_frozen_parameter_needs_no_gradient():
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False))
    module[0].weight.requires_grad_(False)
    graph = capture(module, (torch.ones(2, 4),), {})
    assert {port.name: port.requires_grad for port in graph.inputs} == {
        "0.weight": False,
        "0.bias": True,
        "1.weight": True,
        "input": False,
    }


def test_a_tensor_that_is_closed_over_is_a_constant():
    table = torch.arange(4.0)
    graph = capture(lambda x: x * table + torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.ones(4),), {})
    assert len(names(graph, Role.CONSTANT)) == 2
    (out,) = run(graph, x=torch.ones(4))
    assert out.tolist() == [1, 3, 5, 7]


def test_an_input_that_is_written_to_is_an_output():
    graph = capture(lambda x: x.add_(1) * 2, (torch.ones(3),), {})
    assert [(port.role, port.name) for port in graph.outputs] == [(Role.INPUT_UPDATE, "x"), (Role.RESULT, "result")]


def test_a_generator_argument_is_refused():
    # up to PyTorch 2.11 torch.export refuses it first
    refused = r"a Generator; a torch.Generator is not needed: random numbers follow|type: <class 'torch._C.Generator'>"
    with pytest.raises(CaptureError, match=refused):
        capture(lambda x, g: x + torch.rand(4, generator=g), (torch.ones(4), torch.Generator()), {})
