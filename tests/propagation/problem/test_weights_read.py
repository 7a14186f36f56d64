"""Which parameters the backward reads, operator by operator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """`forward` calls a function of the module, x and its parameters."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn
        self.weight, self.bias = (nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in [(4, 4), (4,)])

    def forward(self, x):
        """A scalar, so that a gradient reaches everything."""
        return self.fn(x, self.weight, self.bias).square().sum()


@pytest.mark.parametrize(
    ("fn", "read"),
    [
        (F.linear, {"weight"}),
        (lambda x, w, b: F.linear(x, w.T, b), {"weight"}),  # what is made of it by a view is read in its place
        (lambda x, w, b: F.embedding(torch.arange(4), w) + b, set()),
        (lambda x, w, b: x + w + b, set()),
        (lambda x, w, b: F.linear(x, w) * b, {"weight", "bias"}),
        # the first sum is computed again; the second leaves the checkpoint, and is kept
        (lambda x, w, b: checkpoint(lambda x: x + w + b, x, use_reentrant=False), {"weight"}),
    ],
)
def test_a_weight_is_read_where_the_gradient_of_another_operand_needs_it(lab, fn, read):
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    problem = lab.problem_of(Model(fn), (x,), lab.LINE)
    weights = {v.node for v in problem.tensors.weights}
    assert {port.name for port in problem.graph.inputs if port.node in weights} == read
