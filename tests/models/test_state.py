"""What a sharded function reads beside its arguments, and what it leaves behind, is as on one device at every call."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import sys
import threading
import time
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn

import partway as pw
from partway.reuse.state import State

X = torch.linspace(-1, 2, 32, dtype=torch.float64).view(4, 8)
SCALE = 2.0
TABLE = {"scale": [1.0, 2.0]}


class Config:
    def __init__(self) -> None:
        self.scale = 1.5
        self.inner = SimpleNamespace(shift=0.5)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 3.0


def activation(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Block(nn.Module):
    shared = 2.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.act = nn.ReLU()
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.temperature = 2.0
        self.config, self.slotted = Config(), Slotted()
        self.offset = torch.ones(8, dtype=torch.float64)
        self.factors = [1.0, 2.0]
        self.options = {"bias": 1.0, "nested": [0.5]}
        self.bend: Callable[[Tensor], Tensor] = activation
        self.flag = False

    @property
    def derived(self) -> float:
        return self.temperature * getattr(self.config, "scale")  # noqa: B009

    def tail(self, y: Tensor) -> Tensor:
        return y * self.shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.act(self.linear(x))) / self.temperature + self.offset * self.derived
        y = y + self.config.inner.shift + self.factors[0] * self.options["bias"] + sum(self.options["nested"])  # type: ignore[misc]
        y = self.bend(y) * SCALE + TABLE["scale"][1] + self.slotted.scale
        return self.tail(-y if self.flag else y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.second(self.first(x)))


def _swap_activation(model: Any) -> None:
    model.second.act = nn.Tanh()


def _shadow(model: Any) -> None:
    model.second.shared = 5.0


def _own_forward(model: Any) -> None:
    model.first.act.forward = MethodType(lambda self, x: x * 3, model.first.act)


def _write_offset(model: Any) -> None:
    model.first.offset.mul_(4.0)


def _new_method(model: Any) -> None:
    model.first.tail = lambda y: y - 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m.first, "temperature", 7.0),
    "attribute of another type": lambda m: setattr(m.first, "temperature", 2),
    "flag": lambda m: setattr(m.second, "flag", True),
    "momentum": lambda m: setattr(m.second.norm, "momentum", 0.9),
    "eps": lambda m: setattr(m.second.norm, "eps", 0.5),
    "probability": lambda m: setattr(m.drop, "p", 1.0),
    "config": lambda m: setattr(m.first.config, "scale", -1.0),
    "config inside": lambda m: setattr(m.first.config.inner, "shift", 9.0),
    "another config": lambda m: setattr(m.first, "config", SimpleNamespace(scale=3.0, inner=SimpleNamespace(shift=1))),
    "slot": lambda m: setattr(m.first.slotted, "scale", 8.0),
    "tensor replaced": lambda m: setattr(m.first, "offset", torch.zeros(8, dtype=torch.float64)),
    "tensor written": _write_offset,
    "element of a list": lambda m: m.first.factors.__setitem__(0, 11.0),
    "value of a dict": lambda m: m.second.options.update(bias=4.0),
    "nested list": lambda m: m.second.options["nested"].append(2.0),
    "function": lambda m: setattr(m.second, "bend", torch.sigmoid),
    "module without parameters": _swap_activation,
    "class attribute shadowed": _shadow,
    "forward of an instance": _own_forward,
    "method of an instance": _new_method,
    "buffer replaced": lambda m: setattr(m.first.norm, "running_mean", torch.ones(8, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_read_is_seen(change: str) -> None:
    model = Model()
    before = State(model)
    assert before.holds()
    CHANGES[change](model)
    if change in ("tensor written", "buffer replaced"):  # another value of what is no part of a plan
        assert State(model).facts == before.facts
    else:
        assert not before.holds()
        assert State(model).facts != before.facts


def differing(changes: list[str]) -> list[str]:
    """The changes after which a sharded model is not what the plain one is."""
    torch.manual_seed(0)
    ours, plain = pw.shard(Model(), mesh={"x": 2}), Model()
    ours(X), plain(X)
    wrong = []
    for name in changes:
        results = []
        for one in (ours, plain):
            CHANGES[name](one)
            one.zero_grad()
            y = one(X)
            (y * y).sum().backward()
            gradients = [whole(p.grad) for p in one.parameters()]
            results.append([y, *gradients, *one.buffers()])
        alike = all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(*results, strict=True))
        wrong += [] if alike else [name]
    return wrong


def test_what_the_forward_reads_may_change() -> None:
    assert not differing(["attribute", "momentum", "config inside", "tensor written", "module without parameters"])


@pytest.mark.slow
def test_everything_that_the_forward_reads_may_change() -> None:
    assert not differing(list(CHANGES))


def test_what_comes_back_is_found_again(plans: list[Any]) -> None:
    model = pw.shard(Block(), mesh={"x": 2})
    model(X)
    for temperature in (3.0, 2.0, 3.0, 2.0):
        model.temperature = temperature
        model(X)
        model(X)
    assert len(plans) == 2


def test_what_is_equal_is_no_other_plan(plans: list[Any]) -> None:
    model = pw.shard(Block(), mesh={"x": 2})
    model(X)
    model.temperature = float("2.0")
    model.factors = [1.0, 2.0]
    model.config = Config()
    model.act = nn.ReLU()
    model.unread = 3
    model(X)
    assert len(plans) == 1


def test_globals_and_closures_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    factor, parts = 2.0, [1.0]

    def f(x: Tensor, power: int = 2) -> Tensor:
        return activation(x * factor) ** power * SCALE + parts[0]

    ours = pw.shard(f, mesh={"x": 2})
    assert torch.allclose(ours(X), f(X))
    factor = 5.0
    assert torch.allclose(ours(X), f(X))
    parts[0] = 3.0
    assert torch.allclose(ours(X), f(X))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 11.0)
    assert torch.allclose(ours(X), f(X))
    monkeypatch.setattr(sys.modules[__name__], "activation", torch.sigmoid)
    assert torch.allclose(ours(X), f(X))
    monkeypatch.setitem(TABLE, "scale", [5.0, 6.0])
    assert torch.allclose(ours(X), f(X))


def test_a_function_whose_code_is_replaced_is_captured_anew() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def thrice(x: Tensor) -> Tensor:
        return x * 3

    ours = pw.shard(lambda x: twice(x) + 1, mesh={"x": 2})
    assert torch.equal(ours(X), X * 2 + 1)
    twice.__code__ = thrice.__code__
    assert torch.equal(ours(X), X * 3 + 1)


@pytest.mark.parametrize(
    "read", [lambda m: getattr(m, f"shift_{m.place}"), lambda m: vars(m)["shift_1"], lambda m: m.__dict__["shift_1"]]
)
def test_attributes_whose_names_are_made_up_may_change(read: Callable[[Any], float]) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift_1, self.place = 1.0, 1

        def forward(self, x: Tensor) -> Tensor:
            return x + read(self)

    sharded = pw.shard(Shifted(), mesh={"x": 2})
    for shift in (1.0, 2.0, 1.0):
        sharded.shift_1 = shift
        assert torch.equal(sharded(X), X + shift)


def test_a_clock_that_is_read_is_said() -> None:
    sharded = pw.shard(lambda x: x + 0 * time.time(), mesh={"x": 2})
    with pytest.warns(UserWarning, match="reads global time, a clock, whose changes are not noticed"):
        sharded(X)


@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_whether_gradients_are_enabled_may_be_asked(first: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3

    sharded, x = pw.shard(fn, mesh={"x": 2}), X.clone().requires_grad_()
    for mode in (first, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(sharded(x), fn(x))
    sharded(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_variables_of_the_environment_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (lambda x: x * float(os.environ["SCALE"]), lambda x: x * float(os.getenv("SCALE", "1"))):
        sharded = pw.shard(read, mesh={"x": 2})
        for scale in (2.0, 3.0, 2.0):
            monkeypatch.setenv("SCALE", str(scale))
            assert torch.equal(sharded(X), X * scale)
            assert torch.equal(sharded(X), X * scale)


def test_a_schedule_is_right_and_said() -> None:
    model, plain = pw.shard(Block().eval(), mesh={"x": 2}), Block().eval()
    for step in range(4):
        model.temperature = plain.temperature = 1.0 + step
        torch.testing.assert_close(model(X), plain(X))
    model.temperature = plain.temperature = 0.5
    with pytest.warns(UserWarning, match="temperature of Block has changed 4 times, and a call is planned"):
        found = model(X)
    torch.testing.assert_close(found, plain(X))


class Leaves(nn.Module):
    """A module that leaves things behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.calls = 0
        self.seen: list[Any] = []
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        self.aux = (y * y).mean()
        self.last_shape = tuple(y.shape)
        self.seen = [y, {"x": x.sum()}]
        return y / self.calls


def test_what_the_forward_leaves_behind_is_there_after_each_call() -> None:
    torch.manual_seed(0)
    plain = Leaves()
    ours = pw.shard(copy.deepcopy(plain), mesh={"x": 2})
    for step in range(3):
        for one in (ours, plain):
            one.zero_grad()
            y = one(X + step)
            (y.sum() + one.aux).backward()
        assert (ours.calls, ours.last_shape) == (plain.calls, plain.last_shape)
        torch.testing.assert_close(ours.aux, plain.aux)
        torch.testing.assert_close(ours.seen, plain.seen)
        torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad)


class Replaces(nn.Module):
    """A module that gives its buffer another tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("held", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "assigned":
            self.held = self.held + x.sum(0)
        elif self.how == "of another size":
            self.held = x.sum(1) + self.held.sum()
        else:
            self.register_buffer("held", x.sum(0) + self.held)
        return x * self.held.sum()


@pytest.mark.parametrize("how", ["assigned", "of another size", "registered"])
def test_a_buffer_that_is_replaced_is_another_in_the_next_call(how: str) -> None:
    plain = Replaces(how)
    ours: Any = pw.shard(copy.deepcopy(plain), mesh={"x": 2}, in_strategy=(("x", None),))
    for size in (4, 4, 8, 4):
        x = torch.ones(size, 8)
        torch.testing.assert_close(ours(x), plain(x))
        torch.testing.assert_close(ours.held, plain.held)


def test_what_is_left_behind_only_does_not_plan_anew(plans: list[Any]) -> None:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.loss = y.square().mean()
            return y

    model = pw.shard(Balanced(), mesh={"x": 2})
    for _ in range(3):
        model(X)
        model.loss.backward()
    assert len(plans) == 1


def test_a_tensor_that_is_carried_on_is_refused() -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.state + x.sum(0)
            return x * self.state

    with pytest.raises(pw.CaptureError, match="Carries keeps a tensor in state from one call to the next, which would"):
        pw.shard(Carries(), mesh={"x": 2})(X)


def test_a_tensor_that_is_carried_on_in_a_class_is_refused() -> None:
    class Carries(nn.Module):
        state: Any = torch.zeros(8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            Carries.state = Carries.state + x.sum(0)
            return x * Carries.state

    with pytest.raises(pw.CaptureError, match=r"Carries keeps a tensor in .*Carries\.state from one call to the next"):
        pw.shard(Carries(), mesh={"x": 2})(X)


class Exchanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.inner = nn.Linear(8, 8, dtype=torch.float64)

    def exchange(self) -> None:
        """What forward does before it computes."""

    def forward(self, x: Tensor) -> Tensor:
        self.exchange()
        return (self.inner(x) * self.weight).sum()


class ExchangesParameter(Exchanges):
    def exchange(self) -> None:
        self.weight = nn.Parameter(self.weight.detach() * 2)


class ExchangesParameterInside(Exchanges):
    def exchange(self) -> None:
        self.inner.register_parameter("bias", None)


class ExchangesModule(Exchanges):
    def exchange(self) -> None:
        self.inner = copy.copy(self.inner)


class AddsModule(Exchanges):
    def exchange(self) -> None:
        self.more = nn.Sequential(nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ExchangesParameter, "parameter weight"),
        (ExchangesParameterInside, "parameter inner.bias"),
        (ExchangesModule, "module inner"),
        (AddsModule, "module more"),
    ],
)
def test_a_parameter_or_module_that_a_forward_replaces_is_refused(kind: type[Exchanges], what: str) -> None:
    model = pw.shard(kind(), mesh={"x": 2}, in_strategy=(("x", None),))
    before = [*model.named_parameters()], [*model.named_modules()]
    said = f"{kind.__name__} replaces {what} while it runs, which a plan cannot do; keep what it computes in a buffer"
    with pytest.raises(pw.CaptureError, match=said):
        model(X)
    now = [*model.named_parameters()], [*model.named_modules()]
    assert [[(name, id(one)) for name, one in each] for each in now] == [
        [(name, id(one)) for name, one in each] for each in before
    ]


class MakesActivation(Exchanges):
    def exchange(self) -> None:
        self.act = nn.ReLU()


def test_a_module_without_tensors_may_be_made_anew() -> None:
    plain, model = MakesActivation(), pw.shard(MakesActivation(), mesh={"x": 2}, in_strategy=(("x", None),))
    model.load_state_dict(plain.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=1e-12, atol=1e-12)


# -- What is asked of tensors, and done to them, beside their values


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * getattr(self.linear.weight, "factor", 1.0) * getattr(x, "factor", 1.0)


def test_attributes_of_tensors_are_those_of_the_call() -> None:
    plain, model = Tagged(), pw.shard(Tagged(), mesh={"x": 2}, in_strategy=(("x", None),))
    x = X.clone()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    for factor in (2.0, 3.0, 2.0):
        for weight in (plain.linear.weight, model.linear.weight):
            weight.factor = factor
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
        x.factor = factor / 4  # type: ignore[attr-defined]
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    del x.factor  # type: ignore[attr-defined]
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


ASKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda m, x: m.linear.weight.grad is None,
    "grad_fn": lambda m, x: x.grad_fn is None,
    "is_leaf": lambda m, x: x.is_leaf,
    "_version": lambda m, x: x._version,
    "_base": lambda m, x: x._base is None,
    "storage_offset()": lambda m, x: x.storage_offset(),
    "untyped_storage()": lambda m, x: x.untyped_storage().nbytes(),
    "is_pinned()": lambda m, x: x.is_pinned(),
}


class Does(Tagged):
    """Does something to its tensors, or asks something of them, and uses the answer as a number."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * (1 + (self.does(self, x) or 0))


@pytest.mark.parametrize("what", ASKS)
def test_what_a_stand_in_does_not_know_is_refused(what: str) -> None:
    said = rf"Does asks for {re.escape(what)} of a tensor, which is not known while it is captured; ask before the call"
    model = pw.shard(Does(ASKS[what]), mesh={"x": 2}, in_strategy=(("x", None),))
    for _ in range(2):
        with pytest.raises(pw.CaptureError, match=said):
            model(X)


def _backward(model: Any, x: Tensor) -> None:
    model.linear(x).sum().backward()


DOES: dict[str, Callable[[Any, Tensor], Any]] = {
    "Does sets requires_grad of input x; set it": lambda m, x: setattr(x, "requires_grad", True),
    "Does sets requires_grad of linear.bias; set it": lambda m, x: setattr(m.linear.bias, "requires_grad", False),
    "Does runs a backward, whose gradients would stay|Does calls backward of a tensor": _backward,
    "Does sets the grad of a tensor; do it outside": lambda m, x: setattr(m.linear.weight, "grad", None),
    "Does sets the attribute seen of linear.bias, which": lambda m, x: setattr(m.linear.bias, "seen", 1),
}


@pytest.mark.parametrize("said", DOES)
def test_what_would_be_done_to_a_stand_in_is_refused(said: str) -> None:
    model = Does(DOES[said])
    sharded = pw.shard(model, mesh={"x": 2}, in_strategy=(("x", None),))
    with pytest.raises(pw.CaptureError, match=said):
        sharded(X)
    assert [p.requires_grad for p in model.parameters()] == [True, True]
    assert [p.grad for p in model.parameters()] == [None, None]
    assert not X.requires_grad


def test_requires_grad_as_it_is_may_be_set() -> None:
    model = pw.shard(Does(lambda m, x: setattr(x, "requires_grad", False)), mesh={"x": 2}, in_strategy=(("x", None),))
    torch.testing.assert_close(model(X), Does(lambda m, x: None)(X), rtol=1e-12, atol=1e-12)


def test_a_seed_inside_is_refused() -> None:
    class Seeds(Tagged):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return self.linear(x).sum()

    model, before = pw.shard(Seeds(), mesh={"x": 2}, in_strategy=(("x", None),)), torch.get_rng_state()
    with pytest.raises(pw.CaptureError, match="Seeds seeds random numbers, which would do nothing to those that"):
        model(X)
    assert torch.equal(torch.get_rng_state(), before)


class Remembers(nn.Module):
    """Does otherwise when it has run before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        known = self.cache is not None and self.cache.shape[0] == x.shape[0]
        self.cache = x.sum(1)
        self.seen.clear()
        self.seen.append(x.sum())
        return x.sum() * (3 if known else 2)


@pytest.mark.filterwarnings("ignore:.*is planned again")
def test_what_a_forward_left_decides_the_next_call() -> None:
    plain, model = Remembers(), pw.shard(Remembers(), mesh={"x": 2})
    for rows in (4, 4, 4, 2, 2, 4, None, 4, 4):
        if rows is None:
            plain.cache = model.cache = None
            continue
        x = X[:rows]
        torch.testing.assert_close(model(x), plain(x), rtol=1e-14, atol=0)
        torch.testing.assert_close(model.cache, plain.cache, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(model.seen, plain.seen, rtol=1e-14, atol=1e-15)


class Holder:
    count = 0

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"counts": [0]}


class CountsInside(nn.Module):
    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.holder, self.kind = holder, type(holder)

    def forward(self, x: Tensor) -> Tensor:
        self.holder.inner["counts"][0] += 1
        self.holder.inner["mean"] = {"of": x.mean()}
        self.kind.count += 1
        return x.sum() * self.holder.inner["counts"][0] * self.kind.count


@pytest.mark.filterwarnings("ignore:.*is planned again")
def test_what_is_left_in_containers_inside_others_and_in_classes_is_that_of_one_device() -> None:
    holders = [type("Holder", (Holder,), {})() for _ in range(2)]
    plain, model = CountsInside(holders[0]), pw.shard(CountsInside(holders[1]), mesh={"x": 2})
    counts = holders[1].inner["counts"]
    for i in range(4):
        assert torch.equal(model(X * i), plain(X * i))
        one, other = (h.inner for h in holders)
        assert (one["counts"], type(holders[0]).count) == (other["counts"], type(holders[1]).count) == ([i + 1], i + 1)
        assert torch.equal(one["mean"]["of"], other["mean"]["of"])
        assert other["counts"] is counts


REGISTRY = {"scale": 2.0}


class Scale:
    def __init__(self) -> None:
        self.value = REGISTRY["scale"]


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.value


class Anew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x * type(self.scale)().value


def test_what_only_constructors_read_is_watched_where_code_may_construct(monkeypatch: pytest.MonkeyPatch) -> None:
    once, anew = pw.shard(Once(), mesh={"x": 2}), pw.shard(Anew(), mesh={"x": 2})
    assert torch.equal(once(X), anew(X))
    monkeypatch.setitem(REGISTRY, "scale", 3.0)
    assert torch.equal(once(X), X * 2)
    assert torch.equal(anew(X), X * 3)
    assert "global REGISTRY" not in State(once).facts
    assert "global REGISTRY" in State(anew).facts


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: float
    seen: list[float]


class KeepsFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.found = Frozen(2.0, []), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.seen.append(self.frozen.scale)
        self.found["tools"] = SimpleNamespace(torch=torch, os=os, scale=self.frozen.scale)  # which hold all there is
        object.__setattr__(self.frozen, "scale", self.frozen.scale + 1)
        return x * self.frozen.scale


@pytest.mark.filterwarnings("ignore:.*is planned again")
def test_a_frozen_object_is_left_as_on_one_device() -> None:
    plain, model = KeepsFrozen(), pw.shard(KeepsFrozen(), mesh={"x": 2})
    for _ in range(3):
        assert torch.equal(model(X), plain(X))
        assert model.frozen == plain.frozen
        assert model.found["tools"].torch is torch


def test_an_object_in_which_the_same_comes_many_times_is_looked_into_once() -> None:
    parts = SimpleNamespace(lock=threading.Lock())
    for _ in range(60):
        parts = SimpleNamespace(one=parts, other=parts)
    model = pw.shard(lambda x: SimpleNamespace(found=x * 2, parts=parts), mesh={"x": 2})
    assert torch.equal(model(X).found, X * 2)


class CountsCalls(nn.Module, ABC):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * type(self).calls


@pytest.mark.filterwarnings("ignore:.*is planned again")
def test_what_a_forward_sets_of_its_class_is_set_of_the_users_class() -> None:
    kind = type("CountsCalls", (CountsCalls,), {})
    model, other = pw.shard(kind(), mesh={"x": 2}), kind()
    for i in range(3):
        assert torch.equal(model(X), X * (2 * i + 1))
        assert torch.equal(other(X), X * (2 * i + 2))
        assert (kind.calls, type(model).calls) == (2 * i + 2, 2 * i + 2)
    del type(model).calls
    assert "calls" not in vars(kind)


@functools.wraps(torch.relu)  # which says that it is torch's
def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def test_a_function_that_wraps_one_of_a_library_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pw.shard(lambda x: scaled(x) + 1, mesh={"x": 2})
    assert torch.equal(model(X), X * 2 + 1)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert torch.equal(model(X), X * 3 + 1)


def test_a_module_named_as_one_of_the_standard_library_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tabnanny.py").write_text("K = 2.0\ndef fn(x):\n    return x * K\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    users = importlib.import_module("tabnanny")
    model = pw.shard(users.fn, mesh={"x": 2})
    assert torch.equal(model(X), X * 2)
    users.K = 3.0
    assert torch.equal(model(X), X * 3)
    monkeypatch.delitem(sys.modules, "tabnanny")


class Absent:
    """What libraries put where an optional module is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no {name}")


class Unbound:
    """A proxy of something that is not there yet."""

    __slots__ = ("held",)

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("unbound")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("unbound")


@pytest.mark.parametrize("kind", [Absent, Unbound])
def test_what_raises_errors_when_it_is_looked_at_may_lie_around(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    around = kind()
    model = pw.shard(lambda x: x * SCALE if x is not None else around.anything, mesh={"x": 2})
    assert torch.equal(model(X), X * 2)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert torch.equal(model(X), X * 3)


def test_an_attribute_of_a_result_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.factor = 2  # type: ignore[attr-defined]
        return y

    with pytest.raises(
        pw.CaptureError, match="fn sets the attribute factor of a tensor that it returns or keeps, which"
    ):
        pw.shard(fn, mesh={"x": 2})(X)


def test_a_list_of_tensors_that_grows_is_refused() -> None:
    class Records(Remembers):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.sum())
            return x.sum()

    model = pw.shard(Records(), mesh={"x": 2})
    model(X)
    with pytest.raises(
        pw.CaptureError, match=r"Records keeps a tensor in seen from one call .* empty it before each call"
    ):
        model(X)
    model.seen.clear()
    model(X)
    assert [float(one) for one in model.seen] == [float(X.sum())]


def test_a_failed_capture_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.kept = 0, list[Any]()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.kept.append(x)
            raise ValueError("no")

    model = pw.shard(Fails(), mesh={"x": 2})
    with pytest.raises(pw.CaptureError, match="ValueError: no"):
        model(X)
    assert (model.calls, model.kept) == (0, [])


def test_an_array_that_cannot_be_watched_is_said() -> None:
    import numpy as np

    table = np.ones(2**16)
    f = pw.shard(lambda x: x * float(table[0]), mesh={"x": 2})
    with pytest.warns(UserWarning, match="reads table of .*<lambda>, a ndarray, whose changes are not noticed"):
        f(X)


def of_one_rank() -> list[str]:
    """What goes wrong on a rank of two, by change."""
    wrong = differing(["attribute", "tensor replaced"])
    left = Leaves()
    ours, plain = pw.shard(copy.deepcopy(left), mesh={"x": 2}), left
    for _ in range(2):
        same = torch.allclose(ours(X), plain(X)) and torch.allclose(ours.aux, plain.aux)
        wrong += [] if same and ours.calls == plain.calls else ["left"]
    return wrong


@pytest.mark.gloo
def test_on_two_processes(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, of_one_rank) == [[], []]


def innermost(one: Any) -> Any:
    while isinstance(one, list):
        one = one[0]
    return one


DEEP: list[Any] = [2.0]
for _ in range(2000):
    DEEP = [DEEP]


def test_a_list_is_watched_however_deep_and_if_it_holds_itself() -> None:
    found = pw.shard(lambda x: x * innermost(DEEP), mesh={"a": 2})
    x = torch.rand(4)
    torch.testing.assert_close(found(x), x * 2)
    inner = DEEP
    while isinstance(inner[0], list):
        inner = inner[0]
    inner[0] = 3.0
    torch.testing.assert_close(found(x), x * 3)
    held: list[Any] = [2.0]
    held += [held, held]
    circular = pw.shard(lambda x: x * held[1][2][0], mesh={"a": 2})
    torch.testing.assert_close(circular(x), x * 2)
    held[0] = 3.0
    torch.testing.assert_close(circular(x), x * 3)


def _pick(x: Tensor) -> Tensor:
    return x.as_strided((4, 3), (6, 2))


def _branch(x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def _step(x: Tensor) -> Tensor:
    return x * getattr(x, "stride")(0)  # noqa: B009


def _windows(x: Tensor) -> Tensor:
    return torch.view_as_real(
        torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), center=False, return_complex=True)
    )


@pytest.mark.parametrize("fn", [_pick, _branch, _step, _windows], ids=lambda fn: fn.__name__)
def test_a_function_that_asks_how_a_tensor_lies_in_memory_is_planned_for_each(fn: Any) -> None:
    found = pw.shard(fn, mesh={"a": 2})
    along, across = torch.rand(4, 6, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64).t()
    for x in (along, across, along):
        torch.testing.assert_close(found(x), fn(x), rtol=1e-12, atol=0)


def test_other_functions_have_one_plan_for_all_strides() -> None:
    found = pw.shard(lambda x: x * 2, mesh={"a": 2})
    found(torch.rand(4, 6))
    plan = found.plan
    found(torch.rand(6, 4).t())
    assert found.plan is plan


def _of_default_dtype(x: Tensor) -> Tensor:
    return x * torch.full((6,), 1 / 3) * (2 if torch.get_default_dtype() is torch.float64 else 3)


def _on_default_device(x: Tensor) -> Tensor:
    return x * 2 if torch.zeros(1).is_meta else x * 3


def _if_deterministic(x: Tensor) -> Tensor:
    return x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3


@pytest.mark.parametrize(
    ("fn", "change", "other", "before"),
    [
        (_of_default_dtype, torch.set_default_dtype, torch.float64, torch.float32),
        (_on_default_device, torch.set_default_device, "meta", None),
        (_if_deterministic, torch.use_deterministic_algorithms, True, False),
    ],
    ids=["dtype", "device", "deterministic"],
)
def test_what_torch_is_set_to_belongs_to_a_call(fn: Any, change: Any, other: Any, before: Any) -> None:
    found, x = pw.shard(fn, mesh={"a": 2}), torch.rand(4, 6)
    torch.testing.assert_close(found(x), fn(x))
    try:
        change(other)
        torch.testing.assert_close(found(x), fn(x))
    finally:
        change(before)
    torch.testing.assert_close(found(x), fn(x))
