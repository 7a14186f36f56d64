"""Numbers that a sharded function makes of tensors: results of Python's own types, and operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.requests.request import engine_of

X = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator(torch.get_default_device()).manual_seed(0)) + 0.5


def sharded(fn: Any) -> Any:
    return pw.shard(fn, mesh={"a": 2, "b": 4}, in_strategy=(("b", "a"),))


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a float": lambda x: x.sum().item(),
    "of float32": lambda x: x.float().max().item(),
    "an integer": lambda x: x.argmax().item(),
    "a truth": lambda x: (x > 0.9).any().item(),
    "beside a loss": lambda x: (x.square().sum(), {"n": x.long().sum().item(), "mean": x.sum().item() / x.numel()}),
    "a list": lambda x: x[2].tolist(),
    "arithmetic": lambda x: (3 - x.sum().item()) ** 2 * x.argmax().item() + -x.min().item(),
    "of a kind": lambda x: int((x > 1).sum()) + 1,
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_number_is_a_result_as_on_one_device(name: str) -> None:
    if name == "arithmetic" and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("torch.export refuses it: it has no name for a number that it deduces bounds of")
    fn = RESULTS[name]
    f = sharded(fn)
    for x in (X, 2 * X):
        found, expected = f(x), fn(x)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        assert type(found) is type(expected)


OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor": lambda x: x * x.sum().item(),
    "a divisor of another dtype": lambda x: x.float() / x.sum().item(),
    "of integers": lambda x: x.long() * 2 + x.argmax().item(),
    "an integer of floats": lambda x: x - x.argmax().item(),
    "computed with": lambda x: x * (x.sum().item() / 2 + 1),
    "an index": lambda x: x[x.sum(1).argmax()] + x[x.sum(1).argmax().item() - 8],
    "in bfloat16": lambda x: x.bfloat16() * x.sum().item(),
}


@pytest.mark.parametrize("fn", OPERANDS.values(), ids=OPERANDS)
def test_a_number_is_an_operand_without_a_gradient_as_on_one_device(fn: Any) -> None:
    f = sharded(fn)
    for given in (X, X.flip(0)):
        found, expected = ([x := given.clone().requires_grad_(), of(x)] for of in (f, fn))
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)
        if expected[1].requires_grad:
            gradients = [torch.autograd.grad(y.double().square().sum(), x)[0] for x, y in (found, expected)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_a_number_of_a_module_trains_beside_its_loss() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> tuple[Tensor, float, int]:
            loss = self.l(x).square().mean()
            return loss, loss.item(), (x > 1).sum().item()

    torch.manual_seed(0)
    plain = Counts()
    model: Any = pw.shard(Counts(), mesh={"x": 4}, in_strategy=(("x", None),), parameter_plan={"l.weight": (None, "x")})
    model.load_state_dict(plain.state_dict())
    for x in (X, -X):
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for loss in (found[0], expected[0]):
            loss.backward()
        torch.testing.assert_close(model.l.weight.grad, plain.l.weight.grad, rtol=1e-12, atol=0)
    assert len(engine_of(model).last.courses) == 1


def test_float_of_a_tensor_is_refused_saying_what_works() -> None:
    with pytest.raises(pw.CaptureError, match=r"x.item\(\) may be computed with and returned, float\(x\) may not"):
        sharded(lambda x: float(x.sum()))(X)
