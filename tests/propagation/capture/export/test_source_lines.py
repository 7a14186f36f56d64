"""Operators and errors name the lines of the caller's code."""

import pytest
import torch
from torch import nn

import partway as pw
import partway.checking.records
import partway.propagation.capture
from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import is_persons, module_path, source_line
from partway.strategy.errors import CaptureError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(4, 8)

    def forward(self, x):
        return self.down(torch.relu(x))


def test_every_operator_knows_its_module_and_its_line():
    relu, down = capture(Block(), (torch.ones(2, 4),), {}).nodes
    assert [module_path(node) for node in (relu, down)] == ["", "down"]
    assert source_line(down).endswith("in forward: return self.down(torch.relu(x))")
    assert source_line(down).startswith("test_source_lines.py:")


def test_the_operators_of_a_plain_function_name_its_lines():
    def half_of_a_product(x):
        y = x @ x
        return y / 2

    graph = capture(half_of_a_product, (torch.ones(4, 4),), {})
    lines = [source_line(node) for node in graph.nodes]
    assert [line.split(", in ", 1)[1] for line in lines] == [
        "half_of_a_product: y = x @ x",
        "half_of_a_product: return y / 2",
    ]
    assert all(line.startswith("test_source_lines.py:") for line in lines)


@pytest.mark.parametrize("module", [torch, torch.nn, partway, partway.checking.records, partway.propagation.capture])
def test_no_line_of_ours_or_of_pytorch_is_taken_for_the_persons(module):
    assert not is_persons(module.__file__)


def test_the_lines_of_a_script_are_the_persons():
    assert is_persons(__file__)
    assert not is_persons("<frozen importlib._bootstrap>")


class Masks(nn.Module):
    def forward(self, x):
        return x[x > 0]


def test_an_operator_of_a_bare_sequential_is_at_its_module():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 8)))
    model = pw.shard(net, mesh={"dp": 2}, in_strategy=(("dp", None),), parameter_plan={"2.0.weight": ("dp", None)})
    model(torch.randn(8, 16))
    assert [o.source for o in model.plan.operators] == ["module 0", "module 1", "module 2.0"]
    assert "at module 2.0\n" in model.plan.explain("*")
    assert "sharded.py" not in model.plan.explain("*")


def test_an_error_of_a_layer_names_it_and_the_callers_line_where_there_is_one():
    bare = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(31, 8)))
    with pytest.raises(CaptureError, match=r"\[31, 8\]\.\n  in module 1\.0 \(Linear\)\nIf the same call"):
        pw.shard(bare, mesh={"dp": 2}, in_strategy=(("dp", None),))(torch.randn(8, 16))
    line = r"test_source_lines\.py:\d+, in forward: return self\.net\(x\)\n  in module net\.1\.0 \(Linear\)"
    with pytest.raises(CaptureError, match=line):
        pw.shard(Around(bare), mesh={"dp": 2}, in_strategy=(("dp", None),))(torch.randn(8, 16))
    with pytest.raises(CaptureError, match=r"test_source_lines\.py:\d+, in forward: return x\[x > 0\]; write"):
        pw.shard(nn.Sequential(nn.Linear(16, 16), Masks()), mesh={"dp": 2}, in_strategy=(("dp", None),))(
            torch.randn(8, 16)
        )


class Around(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)
