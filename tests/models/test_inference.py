"""Plans without a backward: which calls have one, what they hold, and that training beside them is as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, gradients, whole
from torch import Tensor, nn

import partway as pw
from partway.compiler.driver import compile_call
from partway.engine import engine
from partway.runtime.executors import simulate
from partway.strategy import RuntimeStateError, StrategyError
from partway.strategy.errors import DoesNotFitError

BATCH, WIDTH = 32, 16


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, WIDTH)
    return nn.Sequential(*layers).double()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64)


def sharded(devices: int = 4, **options: Any) -> Any:
    return pw.shard(perceptron(), mesh={"dp": 2, "tp": devices // 2}, in_strategy=(("dp", None),), **options)


def evaluate_and_train(devices: int, first: str) -> None:
    """Steps of training with evaluations between, `first` one or the other, have the numbers of one device."""
    model, plain = sharded(devices), perceptron()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for turn in range(3):
        for mode in ("train", "eval") if first == "train" else ("eval", "train"):
            if mode == "eval":
                with torch.inference_mode() if turn % 2 else torch.no_grad():
                    found = model.eval()(batch())
                    torch.testing.assert_close(whole(found), plain.eval()(batch()), rtol=1e-12, atol=1e-13)
                assert model.plan.certificate.inference
                continue
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                one.train()(batch()).square().mean().backward()
                optimizer.step()
            assert not model.plan.certificate.inference
    for (name, one), two in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(two), one, rtol=1e-10, atol=1e-12, msg=name)


class Mean(nn.Module):
    """The mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize("first", ["train", "eval"])
def test_evaluation_and_training_take_turns(first: str) -> None:
    evaluate_and_train(4, first)


@pytest.mark.gloo
@pytest.mark.parametrize("first", ["train", "eval"])
def test_evaluation_and_training_take_turns_in_processes(on_ranks: Callable[..., Any], first: str) -> None:
    on_ranks(2, evaluate_and_train, 2, first)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_call_of_which_no_gradient_is_taken_has_a_plan_without_a_backward(mode: str, training: bool) -> None:
    model = sharded().train(training)
    with MODES[mode]():
        model(batch())
    inference = mode == "inference_mode" or (mode == "no_grad" and not training)
    plan = model.plan
    assert plan.certificate.inference is inference
    assert (" without a backward" in str(plan.certificate)) is inference
    held = plan.memory
    assert (held.gradients, held.optimizer, held.activations) == (0, 0, 0) or not inference
    assert held.gradients or inference


def test_parameters_lie_as_training_has_them_also_where_a_call_without_gradients_comes_first() -> None:
    one, other = sharded(), sharded()
    with torch.no_grad():
        one.eval()(batch())
    one.train()(batch())
    other(batch())
    assert one.plan.parameters == other.plan.parameters


class Tied(nn.Module):
    """Two names for one weight, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


def test_only_the_first_call_without_gradients_is_planned_for_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[bool] = []

    def noting(call: Any, *more: Any) -> Any:
        planned.append(call.inference)
        return compile_call(call, *more)

    monkeypatch.setattr(engine, "compile_call", noting)
    model, plain = pw.shard(Tied().eval(), mesh={"tp": 2}), Tied()
    for rows in (4, 6, 8):
        x = torch.ones(rows, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=0)
    assert planned == [False, True, True, True]


def test_inference_is_said_once_and_plans_parameters_for_it_alone() -> None:
    model = sharded(inference=True)
    found = model.eval()(batch())
    assert not whole(found).requires_grad
    torch.testing.assert_close(whole(found), perceptron().eval()(batch()).detach(), rtol=1e-12, atol=1e-13)
    trained = pw.compile(perceptron(), (batch(),), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),)).plan
    assert model.plan.certificate.cost < trained.certificate.cost
    assert model.plan.memory.total < trained.memory.total


def test_an_input_that_wants_a_gradient_is_refused() -> None:
    model, x = sharded(inference=True), batch()
    model(x)
    with torch.no_grad():
        model(x.requires_grad_())
    with pytest.raises(StrategyError, match=re.escape("input 'input': requires one; detach it, or call under")) as said:
        model(x)
    assert "Sequential was sharded with inference=True, which gives no gradient" in str(said.value)
    with pytest.raises(StrategyError, match=r"inference: is 1 \(int\); write True or False"):
        sharded(inference=1)


def test_gradients_after_a_call_without_are_those_of_one_device() -> None:
    """The same signature, first without and then with gradients, on the same guard."""
    model, plain = sharded().eval(), perceptron().eval()
    with torch.no_grad():
        model(batch())
    loss, expected = gradients(nn.Sequential(plain, Mean()), {"input": batch()})
    model.zero_grad()
    found = model(batch()).square().mean()
    found.backward()
    assert_same_loss(found.detach(), loss, 1e-12)
    named = {f"0.{name}": p.grad for name, p in model.named_parameters()}
    assert_same_gradients(named, expected, 1e-12)


def too_large(devices: int) -> None:
    """Training does not fit; the plan of a call without gradients does, and its parameters lie as it says."""
    torch.manual_seed(0)
    model = pw.shard(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval(), mesh={"tp": devices})
    pw.set_algo_parameters(memory_limit=1.6e6)
    with torch.no_grad():
        found = whole(model(torch.ones(4, 256)))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    torch.testing.assert_close(found, plain(torch.ones(4, 256)).detach(), rtol=1e-5, atol=1e-6)
    assert model.plan.memory.total <= 1.6e6
    with pytest.raises(DoesNotFitError, match="would do"):
        model(torch.ones(4, 256))


def prepared(devices: int) -> None:
    """What was prepared only runs: for two batch sizes, in inference and in training."""
    model, plain = sharded(devices), perceptron()
    whole_batch = batch()
    for rows in (BATCH, BATCH // 2):
        with torch.inference_mode():
            plan = model.eval().prepare(torch.zeros(rows, WIDTH, dtype=torch.float64))
        assert plan.certificate.inference
        assert not model.train().prepare(input=torch.zeros(rows, WIDTH, dtype=torch.float64)).certificate.inference
        assert model.plan.certificate.cost > plan.certificate.cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "compile_call", None)  # nothing is planned any more
        for rows in (BATCH, BATCH // 2):
            with torch.inference_mode():
                found = whole(model.eval()(whole_batch[:rows]))
            torch.testing.assert_close(found, plain.eval()(whole_batch[:rows]).detach(), rtol=1e-12, atol=1e-13)
        loss, expected = gradients(nn.Sequential(plain.train(), Mean()), {"input": whole_batch})
        found = model.train()(input=whole_batch).square().mean()
        found.backward()
    assert_same_loss(whole(found.detach()), loss, 1e-12)
    assert_same_gradients({f"0.{name}": whole(p.grad) for name, p in model.named_parameters()}, expected, 1e-12)


def test_a_call_is_prepared_before_it_comes() -> None:
    prepared(4)


@pytest.mark.gloo
def test_a_call_is_prepared_before_it_comes_in_processes(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, prepared, 2)


def test_a_function_is_prepared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    product = pw.shard(torch.matmul, ((2, 1), (1, 1)), mesh={"dp": 2})
    plan = product.prepare(torch.zeros(4, 6), torch.zeros(6, 2))
    assert product.plan is plan
    monkeypatch.setattr(engine, "compile_call", None)
    torch.testing.assert_close(product(torch.ones(4, 6), torch.ones(6, 2)), torch.full((4, 2), 6.0))


def test_a_name_that_sharded_modules_have_is_refused() -> None:
    class Prepares(nn.Linear):
        def prepare(self) -> str:
            return "mine"

    inside = nn.Sequential(nn.Linear(4, 4))
    inside.plan = nn.Linear(4, 4)
    message = r"has an attribute of its own called {}, and so has every sharded module \(as model.plan\); rename it"
    for module, name in ((Prepares(4, 4), "'prepare'"), (inside, "'plan'")):
        with pytest.raises(StrategyError, match=message.format(name)):
            pw.shard(module, mesh={"dp": 2})
        assert not hasattr(module, "no_sync")
    wrapped = pw.shard(nn.Sequential(Prepares(4, 4)), mesh={"dp": 2})
    assert wrapped(torch.ones(2, 4)).shape == (2, 4)
    assert wrapped[0].prepare() == "mine"


def test_what_cannot_be_prepared_is_said() -> None:
    model = sharded()
    with pytest.raises(TypeError, match="and its call does not fit: missing a required argument: 'input'"):
        model.prepare()
    with torch.device("meta"):
        later = nn.Linear(4, 4)
    with pytest.raises(RuntimeStateError, match="materialize"):
        pw.shard(later, mesh={"dp": 2}).prepare(torch.ones(2, 4))
    pw.set_auto_parallel_context(parallel_mode="stand_alone")
    with pytest.raises(StrategyError, match="there is nothing to prepare in stand_alone mode, which has no plan"):
        model.prepare(batch())


def test_what_is_too_large_to_train_infers() -> None:
    too_large(2)


@pytest.mark.gloo
def test_what_is_too_large_to_train_infers_in_processes(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, too_large, 2)


def test_no_call_copies_the_weights_that_are_split_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks read views of a whole weight where products alone read it, and all else as it was traced."""
    copied: list[tuple[int, ...]] = []
    plain = simulate.full_part

    def noted(part: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not part.is_contiguous():
            copied.append(shape)
        return plain(part, shape)

    monkeypatch.setattr(simulate, "full_part", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double().eval()
    expected = copy.deepcopy(model)
    parameter_plan = {"0.weight": ("tp", None), "2.weight": (None, "tp")}
    sharded = pw.shard(model, mesh={"tp": 4}, parameter_plan=parameter_plan)
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(sharded(x), expected(x), rtol=1e-12, atol=1e-12)
    assert copied == []
    sharded(x).square().sum().backward()
    expected(x).square().sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert set(copied) == {(8, 4)}
    with torch.no_grad():
        model[2].weight.mul_(2)
        expected[2].weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(sharded(x), expected(x), rtol=1e-12, atol=1e-12)
