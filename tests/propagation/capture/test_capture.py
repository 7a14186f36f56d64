"""From a call to a graph, and what cannot be captured."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from partway.propagation.capture.capture import capture
from partway.propagation.capture.export.tracing import capturing
from partway.propagation.graph.graph import verify
from partway.propagation.graph.nodes import describe, operator_name
from partway.strategy import CaptureError

aten = torch.ops.aten


def names(graph, role):
    return [port.name for port in graph.inputs if port.role is role]


def operators(graph):
    return [operator_name(node).split(".")[1] for node in graph.nodes]


def run(graph, **tensors):
    """The outputs of a captured graph, its inputs given by name."""
    given = {**graph.constants, **tensors}
    return fx.Interpreter(graph.module).run(*(given[port.name] for port in graph.inputs))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_the_graph_of_a_tiny_mlp():
    graph = capture(MLP(), (torch.ones(2, 4),), {})
    line = "test_capture.py:38, in forward: return self.down(torch.relu(self.up(x)))"
    assert str(graph).splitlines() == [
        "parameter up.weight: float32[8, 4]    # 128 B",
        "parameter up.bias: float32[8]    # 32 B",
        "parameter down.weight: float32[4, 8]    # 128 B",
        "input x: float32[2, 4]    # 32 B",
        f"# up: {line}",
        "linear: float32[2, 8] = aten.linear.default(x, up.weight, up.bias)    # 64 B",
        f"# {line}",
        "relu: float32[2, 8] = aten.relu.default(linear)    # 64 B",
        f"# down: {line}",
        "linear_1: float32[2, 4] = aten.linear.default(relu, down.weight)    # 32 B",
        "return result = linear_1",
    ]


def test_a_result_that_is_an_input_or_a_number_is_allowed():
    graph = capture(lambda x: (x, 5, x + 1), (torch.ones(2),), {})
    assert [port.name for port in graph.outputs] == ["result[0]", "result[1]"]
    assert graph.result.build(["a", "b"]) == ("a", 5, "b")


def test_autocast_becomes_casts():
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, w).float()

    graph = capture(fn, (torch.ones(2, 4), torch.ones(3, 4)), {})
    assert operators(graph).count("_to_copy") == 3
    (linear,) = (node for node in graph.nodes if node.target is aten.linear.default)
    assert describe(linear) == "bfloat16[2, 3]"


def test_writing_in_place_to_a_fresh_tensor(lab):
    def fn(x):
        y = x * 2
        y += 1
        y.sub_(0.5)
        return y.mul_(2) * x

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    graph = capture(fn, (x,), {})
    verify(graph)
    lab.check_optimum(graph, fn, (x,), lab.LINE)


@pytest.mark.filterwarnings("ignore::partway.strategy.errors.UnknownOperatorWarning")
def test_writing_in_place_to_a_view(lab):
    def fn(x):
        y = x.clone()
        y[0] = 1.0
        y[:, 1] += 2
        y[1:3].mul_(3)
        return y * x

    x = torch.randn(4, 4, dtype=torch.float64)
    graph = verify(capture(fn, (x,), {}))
    (out,) = run(graph, x=x)
    torch.testing.assert_close(out, fn(x))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "its course depends on the values of tensors"),
        (lambda x: torch.full((3,), x[0].item()), "on the values of tensors|its course depends"),
        (lambda x: x.nonzero(), "depends on the values of tensors"),
        (lambda x: x @ torch.ones(5, 5), "could not capture .* as one static graph: RuntimeError"),
        (lambda x: x[7], "could not capture .* as one static graph: IndexError"),
        (lambda x: x.no_such_method(), "AttributeError"),
    ],
)
def test_what_cannot_be_captured_is_refused(fn, message, capfd):
    with pytest.raises(CaptureError, match=message):
        capture(fn, (torch.ones(3),), {})
    assert not capturing()
    assert capfd.readouterr().err == ""  # torch.export prints its graph


def test_capturing_is_known_inside_only():
    seen = []
    capture(lambda x: seen.append(capturing()) or x + 1, (torch.ones(2),), {})
    assert set(seen) == {True}
    assert not capturing()


def test_meta_tensors_are_captured_like_others():
    with torch.device("meta"):
        module, x = MLP(), torch.ones(2, 4)
    graph = capture(module, (x,), {})
    assert graph.device == "meta"
    assert str(graph) == str(capture(MLP(), (torch.ones(2, 4),), {}))


# -- what capture leaves behind, and what it cannot keep


def test_a_copy_of_what_was_just_made_is_not_made_again():
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def copies(fn):
        graph = capture(fn, (x, w), {})
        return sum(node.target is torch.ops.aten.clone.default for node in graph.nodes)

    assert copies(lambda x, w: (F.dropout(x @ w, 0.0) * 2).sum()) == 0
    assert copies(lambda x, w: ((x @ w).clone() * 2).sum()) == 0
    assert copies(lambda x, w: (x.clone() * w).sum()) == 1  # of an input, which the caller may write into
    assert copies(lambda x, w: (x @ w).clone()) == 1  # what is returned
    assert copies(lambda x, w: ((x @ w).t().contiguous() * 2).sum()) == 1  # it lies otherwise
    assert copies(lambda x, w: ((x @ w)[:2].clone() * 2).sum()) == 1  # of a part
