"""Backwards of a call's results one after another: what plain PyTorch allows is right, to the last None, and what it
refuses is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partway as pw

Ranks = Callable[..., list[Any]]
ORDERS = [[(0, 1, 2)], [(0,), (1,), (2,)], [(2,), (0,)], [(1,)], [(1,), (0, 2)], [(2, 1), (0,)]]


class Towers(nn.Module):
    """Three results. The first and the last share a weight, all of them x + 1, and none an operator that keeps
    something for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + 1
        return self.c(torch.tanh(self.a(x))), self.b(torch.relu(x) * y).exp(), self.c(y + x).pow(2).sum(1)


class Heads(nn.Module):
    """Two results of one trunk, with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm, self.a, self.b = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 4),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.trunk(x)))
        return self.a(h).pow(2).mean(), nn.functional.dropout(self.b(h), 0.25).pow(2).mean()


def pair(kind: type[nn.Module], inputs: int, **annotations: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = kind().double()
    n = pw.init(simulate=4)
    return plain, pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": n // 2},
                           in_strategy=(("dp", None),) * inputs, **annotations)  # fmt: skip


def gradients(
    model: Any, order: list[tuple[int, ...]], call: Callable[..., Any] | None = None, **how: Any
) -> list[Any]:
    """What x, y and the parameters have in `.grad` after a backward of each sum of results in `order`."""
    model.zero_grad()
    torch.manual_seed(1)
    x, y = (torch.randn(8, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = (call or model)(x, y)
    for these in order:
        total = sum(whole(results[i]).sum() for i in these)
        assert isinstance(total, Tensor)
        total.backward(**how)
    return [None if t.grad is None else whole(t.grad).clone() for t in (x, y, *model.parameters())]


def assert_alike(got: list[Any], wanted: list[Any]) -> None:
    assert [g is None for g in got] == [w is None for w in wanted]
    for g, w in zip(got, wanted, strict=True):
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def one_after_another() -> None:
    plain, model = pair(Towers, 2, parameter_plan={"a.weight": ("tp", None)})
    for order in ORDERS:
        assert_alike(gradients(model, order), gradients(plain, order))
    for order in ([(0,), (0,)], [(0, 1), (2, 1)]):
        with pytest.raises(RuntimeError, match="second time"):
            gradients(plain, order)
        with pytest.raises(pw.strategy.RuntimeStateError, match="a backward has run through this call before"):
            gradients(model, order)
        assert_alike(gradients(model, order, retain_graph=True), gradients(plain, order, retain_graph=True))


def test_results_that_share_no_operators_are_differentiated_one_after_another() -> None:
    one_after_another()


@pytest.mark.gloo
def test_processes_differentiate_results_one_after_another(on_ranks: Ranks) -> None:
    on_ranks(2, one_after_another)


def test_a_checkpointed_call_is_differentiated_one_after_another() -> None:
    plain, model = pair(Towers, 2)

    def call(*xs: Tensor) -> Any:
        return checkpoint(model, *xs, use_reentrant=False)

    for order in ORDERS[:4]:
        assert_alike(gradients(model, order, call), gradients(plain, order))


def test_results_of_one_trunk_need_a_retained_graph() -> None:
    plain, model = pair(Heads, 1)
    pw.set_auto_parallel_context(random_numbers="torch")
    x = torch.randn(8, 16, dtype=torch.float64)
    for order in ((0, 1), (1, 0)):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(2)
            results = one(x)
            results[order[0]].backward(retain_graph=True)
            results[order[1]].backward()
        assert_alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(model.norm.running_mean, plain.get_submodule("norm").running_mean)
    first, second = model(x)
    first.backward()
    with pytest.raises(pw.strategy.RuntimeStateError, match="call backward once, of the sum of the results, or with"):
        second.backward()


def test_one_part_is_stepped_between_the_backwards_of_two() -> None:
    plain, model = pair(Towers, 2)
    for one in (plain, model):
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (one.a, one.b, one.c)]
        for step in range(2):
            torch.manual_seed(step)
            x, y = (torch.randn(8, 16, dtype=torch.float64) for _ in range(2))
            first, second, _ = one(x, y)
            second.sum().backward()
            optimizers[1].step()
            first.sum().backward()
            optimizers[0].step()
            one.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-10, atol=1e-12, msg=name)


def test_gradients_of_some_inputs_are_asked_for_one_after_another() -> None:
    plain, model = pair(Towers, 2)
    found = []
    for one in (plain, model):
        torch.manual_seed(1)
        x, y = (torch.randn(8, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
        first, second, _ = one(x, y)
        got = torch.autograd.grad(first.sum(), [x, one.a.weight])
        found.append([*got, *torch.autograd.grad(second.sum(), [y, one.b.weight])])
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(one(x, y)[0].sum(), [one.b.weight])
    assert_alike(found[1], found[0])


def test_what_is_not_asked_for_does_not_spoil_what_is() -> None:
    """A gradient of zero times the infinite slope of a result that nobody differentiates would be no number."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.sqrt()

    x = torch.zeros(8, 16, dtype=torch.float64, requires_grad=True)
    first, _ = pw.shard(f, mesh={"dp": 2}, in_strategy=(("dp", None),))(x)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_micro_batches_accumulate_what_is_asked_for() -> None:
    plain, model = pair(Towers, 2, parameter_plan={"a.weight": ("tp", None)})
    for one in (plain, model):
        for step in range(3):
            torch.manual_seed(step)
            x, y = (torch.randn(8, 16, dtype=torch.float64) for _ in range(2))
            if one is model and step < 2:
                with model.no_sync():
                    first, second, third = one(x, y)
            else:
                first, second, third = one(x, y)
            (first.sum() if step == 0 else (first.sum() + third.sum())).backward()
            if step:
                second.sum().backward()
    assert_alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
