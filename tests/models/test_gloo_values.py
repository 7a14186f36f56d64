"""What depends on the values of a call is, on every one of 2 gloo processes, what it is on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import test_courses
import test_data_dependent_sizes
import test_numbers
import torch
from checks import whole
from torch import Tensor, nn

import partway as pw

pytestmark = pytest.mark.gloo

Ranks = Callable[..., list[Any]]
SPLIT = {"mesh": {"x": 2}, "in_strategy": (("x", None),)}


def difference(name: str, fn: Any, f: Any, given: tuple[Tensor, ...]) -> list[str]:
    """How the sharded `f` differs from `fn`: in its result, the gradient of its first argument, or what it raises."""
    found, expected = (outcome(each, given) for each in (f, fn))
    if isinstance(expected, str):
        return [f"{name}: {found} for {expected}"] * (found != expected)
    try:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    except AssertionError as error:
        return [f"{name}: {error}"]
    return [] if type(found[0]) is type(expected[0]) else [f"{name}: {found[0]!r} for {expected[0]!r}"]


def outcome(fn: Any, given: tuple[Tensor, ...]) -> Any:
    x = given[0].clone().requires_grad_()
    try:
        result = whole(fn(x, *given[1:]))
    except (AssertionError, FloatingPointError) as error:  # the caller's own; pytest adds lines
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    loss = result[0] if isinstance(result, tuple) else result
    if isinstance(loss, Tensor) and loss.requires_grad:
        return result, torch.autograd.grad(loss.square().sum(), x)[0]
    return result, None


def programs(kind: str) -> tuple[dict[str, Any], list[tuple[Tensor, ...]]]:
    """The functions of a kind, and the calls of each."""
    if kind == "sizes":
        return test_data_dependent_sizes.PROGRAMS, [test_data_dependent_sizes.arguments(seed) for seed in (0, 1, 0)]
    x = test_numbers.X
    if kind == "checks":
        checks = (test_courses.asserts, test_courses.asserts_equal, test_courses.raises)
        return {check.__name__: check for check in checks}, [(x,), (x * -torch.nan,), (x + 1,)]
    found: dict[str, Any] = test_numbers.RESULTS if kind == "results" else test_numbers.OPERANDS
    return found, [(x,), (x.flip(0),)]


def wrong(kind: str, name: str) -> list[str]:
    """What goes wrong on a rank, of a function of a kind."""
    found, calls = programs(kind)
    f = pw.shard(found[name], mesh={"x": 2}, in_strategy=(("x", None), *[None] * (len(calls[0]) - 1)))
    return [line for call in calls for line in difference(name, found[name], f, call)]


SOME = {
    "results": ["a float", "a truth", "beside a loss", "a list"],
    "operands": ["a factor", "of integers", "an index"],
    "sizes": ["rows", "nonzero", "repeated rows", "writes"],
    "checks": ["asserts", "raises"],
}


@pytest.mark.parametrize("kind", SOME)
def test_what_values_say_is_that_of_one_device(on_ranks: Ranks, kind: str) -> None:
    for name in SOME[kind]:  # a call each: the time of a call is limited
        assert on_ranks(2, wrong, kind, name) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in SOME for name in programs(kind)[0] if name not in SOME[kind]]
)
def test_everything_that_values_say_is_that_of_one_device(on_ranks: Ranks, kind: str, name: str) -> None:
    assert on_ranks(2, wrong, kind, name) == [[], []]


# -- what modules keep, and modes


class Keeps(nn.Module):
    """A module that makes a buffer in its first call, and a longer one in a longer call, as ALiBi does."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.length < x.shape[0]:
            self.length = x.shape[0]
            self.register_buffer("bias", torch.arange(float(self.length)).double(), persistent=False)
        y: Tensor = self.inner(x) * self.bias[: len(x), None]
        return y


def steps(model: Any, batches: list[Tensor]) -> list[Any]:
    """Results, and the gradients of parameters, of a call for each batch."""
    found = []
    for x in batches:
        model.zero_grad()
        y = whole(model(x))
        y.square().sum().backward()
        found += [y.detach(), *(whole(p.grad) for p in model.parameters())]
    return found


class Averages(nn.Module):
    """A module that gives its buffer another tensor in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def leaves_buffers() -> None:
    batches = [torch.randn(size, 4, dtype=torch.float64) for size in (4, 4, 8, 4)]
    for build, name in ((Keeps, "bias"), (Averages, "mean")):
        torch.manual_seed(0)
        plain = build()
        model: Any = pw.shard(copy.deepcopy(plain), **SPLIT)  # type: ignore[call-overload]
        torch.testing.assert_close(steps(model, batches), steps(plain, batches), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(getattr(model, name), getattr(plain, name))  # no DTensor
        torch.testing.assert_close(model.state_dict().get(name), plain.state_dict().get(name))


def test_buffers_that_are_registered_or_replaced_in_a_call_are_there_after_it(on_ranks: Ranks) -> None:
    on_ranks(2, leaves_buffers)


def autocasts() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model: Any = pw.shard(copy.deepcopy(plain), **SPLIT)  # type: ignore[call-overload]
    x = torch.randn(4, 8)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        gradients = []
        for net in (model, plain):
            net.zero_grad()
            with torch.autocast(torch.get_default_device().type, dtype):
                y = whole(net(x))
            assert y.dtype is dtype
            y.float().square().sum().backward()
            gradients.append((y.detach(), whole(net[0].weight.grad)))
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


def test_each_dtype_of_autocast_is_a_plan_of_its_own(on_ranks: Ranks) -> None:
    on_ranks(2, autocasts)


def observes() -> None:
    """A forward hook that only looks, and cannot be captured: it runs on the real values of each call."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    ours = copy.deepcopy(plain)
    seen: dict[str, list[float]] = {"ours": [], "plain": []}
    for name, net in (("ours", ours), ("plain", plain)):
        net[1].register_forward_hook(lambda m, args, out, name=name: seen[name].append(float(out.abs().max())))
    model: Any = pw.shard(ours, **SPLIT)  # type: ignore[call-overload]
    batches = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(steps(model, batches), steps(plain, batches), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen["ours"], seen["plain"], rtol=1e-12, atol=1e-12)


def test_a_hook_that_looks_sees_whole_values(on_ranks: Ranks) -> None:
    on_ranks(2, observes)
