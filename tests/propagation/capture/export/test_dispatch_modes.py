"""What the modes of a capture see: tensors from outside, gradients that are disabled, functions that are replaced."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import operator_name
from partway.strategy import CaptureError


def operators(graph):
    return [operator_name(node).split(".")[1] for node in graph.nodes]


def test_a_parameter_that_is_closed_over_is_refused_for_no_gradient_would_reach_it():
    weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"float32\[3, 4\]\); shard the module they belong to, or pass them"):
        capture(lambda x: F.linear(x, weight), (torch.ones(2, 4),), {})


def test_a_no_grad_region_stops_gradients(lab):
    def fn(x):
        with torch.no_grad():
            scale = x.sum() * 2
        return x * scale

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    graph = capture(fn, (x,), {})
    lab.check_optimum(graph, fn, (x,), lab.LINE)
    assert "detach" in operators(graph)


def test_nested_no_grad_and_enable_grad(lab):
    def fn(x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
            y = y + 1
        return (x * y * z).sum()

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    lab.check_optimum(capture(fn, (x,), {}), fn, (x,), lab.LINE)


def test_an_lstm_that_gets_its_states_by_name_is_captured():
    def fn(x, h, w, u):
        return torch.lstm(
            x, hx=[h, h], params=[w, u], has_biases=False, num_layers=1, dropout=0.0, train=True, bidirectional=False,
            batch_first=False,
        )  # fmt: skip

    args = torch.randn(3, 4, 3), torch.randn(1, 4, 2), torch.randn(8, 3), torch.randn(8, 2)
    graph = capture(fn, args, {})
    for found, expected in zip(fx.Interpreter(graph.module).run(*args), fn(*args), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_reduction_that_ctc_loss_has_not_is_refused():
    x, labels, lengths = torch.randn(5, 2, 4).log_softmax(2), torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2])
    with pytest.raises(CaptureError, match="ValueError: average is not a valid value for reduction"):
        capture(lambda x: torch.nn.functional.ctc_loss(x, labels, lengths, lengths, reduction="average"), (x,), {})


@pytest.mark.parametrize("lookup", [F.embedding, F.embedding_bag])
def test_an_embedding_that_renormalises_its_weight_is_refused(lookup):
    with pytest.raises(CaptureError, match=rf"{lookup.__name__} with max_norm=1.0 writes to its weight in place"):
        capture(lambda i, w: lookup(i, w, max_norm=1.0), (torch.tensor([[0, 1]]), torch.ones(8, 4)), {})
