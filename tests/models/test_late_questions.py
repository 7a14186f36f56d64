"""What a function asks behind a net is answered by the call itself: assumed, looked at, and run again where it was not
so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn

import partway as pw
from partway.requests.request import engine_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mean, self.var = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Likelihood(Net):
    """torch.nn.functional.gaussian_nll_loss raises where a variance is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(self.mean(x), x, self.var(x).abs())


class Raises(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(self.mean(x), x, self.var(x) + 5 - x.abs().max())


class Asserts(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mean(x)
        assert torch.isfinite(y).all(), "not finite"
        assert not torch.isnan(self.var(y)).any()
        return y.pow(2).mean()


class Branches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.taken = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mean(x))
        if self.mean(x).sum() > 0:
            y = torch.tanh(self.var(y))
            self.taken = "positive"
            if y.mean() > 0:
                y = y * 2
                self.taken = "twice"
        else:
            self.taken = "negative"
        return y.pow(2).mean()


class Loops(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mean(x)
        while (y.abs().max() > 1).item():
            y = y / 2
        return y.sum()


def split(model: nn.Module) -> Any:
    return pw.shard(model, mesh={"dp": 2}, in_strategy=(("dp", None),))


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def assert_alike(model: Any, plain: Any, x: Tensor) -> None:
    """Loss, gradients and buffers of one call."""
    for one in (model, plain):
        one.zero_grad()
    found, expected = model(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Likelihood, Asserts])
def test_a_check_behind_a_net_is_one_plan(kind: type[Net], plans: list[Any]) -> None:
    plain, model = kind(), split(kind())
    for seed in range(4):
        assert_alike(model, plain, numbers(seed))
    assert len(plans) == 1


def test_a_check_that_fails_raises_what_it_raises_on_one_device() -> None:
    model = split(Asserts())
    x = numbers(0)
    model(x)
    bad = x.clone()
    bad[0, 0] = float("inf")
    for _ in range(2):
        with pytest.raises(AssertionError, match="not finite"):
            model(bad)
        assert_alike(model, Asserts(), x)
    model = split(Raises())
    with pytest.raises(ValueError, match="var has negative entry"):
        model(x * 100)
    assert_alike(model, Raises(), x)


@pytest.mark.filterwarnings("ignore:.*planned")
@pytest.mark.parametrize("kind", [Branches, Loops])
def test_branches_and_loops_on_what_a_net_gives_are_those_of_one_device(kind: type[Net], plans: list[Any]) -> None:
    plain, model = kind(), split(kind())
    for seed in (*range(8), *range(8)):
        assert_alike(model, plain, numbers(seed, 1 + seed % 3))
        assert getattr(model, "taken", "") == getattr(plain, "taken", "")
    assert 1 < len(plans) < 9


def test_a_call_that_ran_again_draws_what_it_would_have_drawn() -> None:
    class Drops(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.3))

    first, model = split(Drops()), split(Drops())
    found: list[list[float]] = [[], []]
    for seed in (0, 1, 2, 3, 0, 1, 2, 3):  # with the other course as the last one, and with it already there
        for values, each in zip(found, (first, model), strict=True):
            torch.manual_seed(seed)
            values.append(each(numbers(seed)).item() + torch.rand(()).item())
        engine_of(model).last.courses.reverse()
    assert found[0] == found[1]


def test_hooks_are_not_run_for_an_answer_that_was_assumed() -> None:
    model, seen = Asserts(), list[float]()
    model.mean.register_forward_hook(lambda module, args, output: seen.append(output.sum().item()))
    with pytest.raises(pw.CaptureError, match=r"Asserts asks for values behind a matrix product .* and has hooks"):
        split(model)(numbers(0))


def branches_on_ranks() -> str:
    model, plain = split(Branches()), Branches()
    for seed in range(6):
        x = numbers(seed, 1 + seed % 3)
        found, expected = whole(model(x)), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        found.backward()
        expected.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-11, atol=1e-12)
    return str(model.taken)


def checks_on_ranks() -> str:
    model = split(Asserts())
    x = numbers(0)
    model(x)
    x[0, 0] = float("inf")
    with pytest.raises(AssertionError, match="not finite"):
        model(x)
    return "not finite"


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:.*planned")
def test_ranks_take_the_same_course(on_ranks: Any) -> None:
    first, second = on_ranks(2, branches_on_ranks)
    assert first == second
    assert on_ranks(2, checks_on_ranks) == ["not finite"] * 2
