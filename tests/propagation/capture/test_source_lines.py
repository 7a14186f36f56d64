"""Operators and errors name the lines of the caller's code."""

import pytest
import torch
from torch import nn

import partway.checking.records
import partway.propagation.capture
from partway.propagation.capture.capture import capture
from partway.propagation.capture.source_lines import is_persons
from partway.propagation.graph.nodes import module_path, source_line


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
