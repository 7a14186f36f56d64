"""What the backward reads of a call, against what autograd saves of it."""

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import differentiated, gradient_flow
from partway.propagation.memory.needs import NOTHING, Needs, needs_of


def needs(fn, *tensors):
    """Of each call of `fn` its needs, by its name."""
    graph = capture(fn, tensors, {})
    found = needs_of(graph, gradient_flow(graph, differentiated(graph)))
    return {node.name: found[node] for node in graph.nodes if node in found}


def drawn(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("fn", "tensors", "name", "expected"),
    [
        (lambda x, w: F.linear(x, w).sum(), [(4, 3), (5, 3)], "linear", Needs(frozenset({0, 1}))),
        (lambda x, w, b: F.linear(x, w, b).sum(), [(4, 3), (5, 3), (5,)], "linear", Needs(frozenset({0, 1}))),
        (lambda x: torch.tanh(x).sum(), [(4, 3)], "tanh", Needs(frozenset(), frozenset({0}))),
        (lambda x: torch.sin(x).sum(), [(4, 3)], "sin", Needs(frozenset({0}))),
        (lambda x, y: (x + y).sum(), [(4, 3), (4, 3)], "add", NOTHING),
        (lambda x, y: (x * y).sum(), [(4, 3), (4, 3)], "mul", Needs(frozenset({0, 1}))),
        (lambda x: x.t().sum(), [(4, 3)], "t", NOTHING),
    ],
)
def test_the_backward_of_a_call_reads_what_its_formula_does(fn, tensors, name, expected):
    found = needs(fn, *(drawn(*shape) for shape in tensors))
    assert found[next(key for key in found if key.startswith(name))] == expected


def test_what_needs_no_gradient_is_not_read():
    x, mask = drawn(4, 3), torch.ones(4, 3)
    found = needs(lambda x, m: (x * m).sum(), x, mask)
    assert found["mul"] == Needs(frozenset({1}))


def test_statistics_stand_beside():
    x, w, b = drawn(4, 8), drawn(8), drawn(8)
    found = needs(lambda x, w, b: F.layer_norm(x, (8,), w, b).sum(), x, w, b)
    (norm,) = [value for key, value in found.items() if key.startswith("layer_norm")]
    assert norm.operands >= {0, 1}
    assert norm.beside == 2 * 4 * 4  # a mean and a deviation of each row


def test_what_is_made_of_constants_alone_is_made_again():
    def fn(x):
        mask = torch.arange(16)[:, None] >= torch.arange(16)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()

    found = needs(fn, drawn(2, 4, 16, 8))
    (attention,) = [value for key, value in found.items() if key.startswith("scaled_dot")]
    assert attention.beside < 16 * 16 * 4 + 2 * 4 * 16 * 4  # statistics of each row, and not the mask as floats


def test_what_cannot_run_on_fake_tensors_may_read_everything():
    graph = capture(lambda x: torch.sin(x).sum(), (drawn(3),), {})
    node = next(n for n in graph.nodes if n.name == "sin")
    target = node.target
    node.target = lambda x: 1 / 0
    try:
        found = needs_of(graph, gradient_flow(graph, differentiated(graph)))
    finally:
        node.target = target
    assert found[node] == Needs(frozenset({0}), frozenset({0}))
