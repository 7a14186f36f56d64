"""A backward in two parts has the gradients of one, and computes each product once."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import partway as pw
from partway.propagation.graph.port import Role
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.propagation.program.weights_late import weights_late

aten = torch.ops.aten


class Block(nn.Module):
    """With a norm, a residual, an activation and a bias; `tied`: one weight is read twice."""

    def __init__(self, tied=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.tied = tied

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)))
        x = x + self.down(hidden)
        return x + (F.linear(hidden.tanh(), self.down.weight) if self.tied else 0)


class Attention(nn.Module):
    """Several heads, so that there are views between products."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def run(module, values):
    return list(fx.Interpreter(fx.GraphModule(module, module.graph)).run(*values))


def products(graph):
    return sum(node.op == "call_function" and "mm" in str(node.target) for node in graph.nodes)


def sent(graph):
    collectives = [n for n in graph.nodes if n.target is convert and kind_of(*n.args[1:3]).communicates]
    return len(collectives) + sum(len(n.args[0]) for n in graph.nodes if n.target is convert_group)


@pytest.mark.parametrize("model", [Block(), Block(tied=True), Attention()], ids=["block", "tied", "attention"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}], ids=str)
def test_the_two_parts_give_the_gradients_of_one(model, mesh):
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    with pw.auto_parallel_context(parallel_mode="data_parallel"):
        program = pw.compile(model, (x,), mesh=mesh).program
    of_inputs = [i for i, port in enumerate(program.inputs) if port.port.role is not Role.PARAMETER]
    parts = weights_late(program, of_inputs)
    assert [program.inputs[i].port.name for i in parts.early] == ["x"]
    assert products(parts.first.graph) + products(parts.rest.graph) == products(program.backward.graph)
    assert products(parts.rest.graph) > 0
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in parts.rest.graph.find_nodes(op="placeholder"))
    if mesh == {"dp": 2}:  # gradients of weights are reduced in the rest; ranks do not run here
        assert sent(parts.first.graph) == 0
        assert sent(parts.rest.graph) == sent(program.backward.graph) > 0
        return
    values = dict(model.named_parameters())
    inputs = [values.get(port.port.name, x).detach() for port in program.inputs]
    results = run(program.forward, inputs)
    y, saved = results[0], results[len(program.outputs) :]
    tangent = torch.randn_like(y)
    early = run(parts.first, [*saved, tangent])
    late = run(parts.rest, early[len(parts.early) :])
    found = dict(zip((*parts.early, *parts.late), (*early[: len(parts.early)], *late), strict=True))
    expected = torch.autograd.grad(model(x), [values.get(p.port.name, x) for p in program.inputs], tangent)
    for i, gradient in enumerate(expected):
        torch.testing.assert_close(found[i], gradient, rtol=1e-12, atol=1e-12)


def test_inputs_without_gradients_leave_all_to_the_rest():
    program = pw.compile(Block(), (torch.randn(2, 4, 8),), mesh={"dp": 1}).program
    parts = weights_late(program, ())
    assert parts.early == ()
    assert products(parts.first.graph) == 0
    assert products(parts.rest.graph) == products(program.backward.graph)
