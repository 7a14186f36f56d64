"""What is changed between a forward and its backward: the gradients are those of the forward, or an error says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn

import partway as pw

LAYERS = 6
X = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def a_parameter_is_changed() -> dict[str, str]:
    """What the backward says when a parameter was changed, or how far the first gradient is off, by parameter."""
    plain = Deep()
    plain(X).sum().backward()
    said = {}
    for name, _ in plain.named_parameters():
        model = pw.shard(Deep(), mesh={"x": 2})
        result = model(X)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        try:
            result.sum().backward()
        except pw.PartwayError as error:
            said[name] = str(error)
        else:
            found, expected = model.get_parameter("layers.0.bias").grad, plain.get_parameter("layers.0.bias").grad
            said[name] = "right" if torch.allclose(whole(found), whole(expected), atol=1e-12) else "wrong"
    return said


EXPECTED = {
    f"layers.{i}.{kind}": "right"
    if i == 0 or kind == "bias"
    else f"parameter layers.{i}.weight was changed in place "
    "after the forward that this is the backward of; call backward before what changes it, such as an optimizer's step"
    for i in range(LAYERS)
    for kind in ("weight", "bias")
}


def test_a_parameter_that_the_backward_reads_may_not_be_changed() -> None:
    assert a_parameter_is_changed() == EXPECTED


@pytest.mark.gloo
def test_a_parameter_may_not_be_changed_on_processes(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, a_parameter_is_changed) == [EXPECTED] * 2


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "square": lambda x: x * x,
    "softmax": lambda x: torch.softmax(x, -1),
    "view": lambda x: x.view(-1),
    "reversed": lambda x: x.flip(0)[2:],
}
STRATEGIES: list[Any] = [None, ((2, 1),), ((1, 2),)]


def results_are_changed() -> list[str]:
    """Where the gradient is another one than that of the result as it was, times two, or what is left is not."""
    wrong = []
    for name, fn in FUNCTIONS.items():
        for strategy in STRATEGIES:
            x, y = (X.clone().requires_grad_() for _ in range(2))
            expected, found = fn(x).clone(), pw.shard(fn, in_strategy=strategy, mesh={"x": 2})(y)
            for result in (expected, found):
                result.mul_(2).add_(1)
                result.square().sum().backward()
            assert x.grad is not None
            assert y.grad is not None
            same = torch.allclose(found, expected, atol=1e-12) and torch.allclose(y.grad, x.grad, atol=1e-12)
            wrong += [] if same else [f"{name} {strategy}"]
    return wrong


def test_a_result_may_be_changed() -> None:
    assert results_are_changed() == []


@pytest.mark.gloo
def test_a_result_may_be_changed_on_processes(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, results_are_changed) == [[], []]
