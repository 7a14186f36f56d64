"""A call like the last one only runs; any that a plan could be another for is looked up again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import partway as pw


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Any, scale: Any = 1, more: Any = None) -> Any:
        return (self.inner(x) * (scale if isinstance(scale, float | int) else 1)).sum()


X = torch.ones(4, 8)


CHANGES: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]] | None]] = {
    "shape": lambda model: ((torch.ones(8, 8),), {}),
    "requires_grad of an input": lambda model: ((torch.ones(4, 8, requires_grad=True),), {}),
    "a plain value": lambda model: ((X, 2), {}),
    "its type": lambda model: ((X, 1.0), {}),
    "structure": lambda model: ((X,), {"more": [torch.ones(2)]}),
    "a value without equality": lambda model: ((X, 1, np.ones(3)), {}),
    "training": lambda model: model.eval(),
    "training of a module inside": lambda model: model.inner[1].eval(),
    "requires_grad of a parameter": lambda model: model.inner[0].bias.requires_grad_(False),
    "a parameter without a gradient": lambda model: model.inner[0].register_parameter("bias", None),
    "dtype": lambda model: (model.double() and (X.double(),), {}),
    "the context": lambda model: pw.set_auto_parallel_context(gradients_mean=False),
    "parts of batch norms": lambda model: pw.set_auto_parallel_context(batch_norm_parts=2),
    "the algorithm's parameters": lambda model: pw.set_algo_parameters(fully_use_devices=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_is_planned_for(plans: list[Any], change: str) -> None:
    model = pw.shard(Scaled(), mesh={"x": 2})
    for _ in range(3):
        model(X)
    assert len(plans) == 1
    found = CHANGES[change](model)
    args, kwargs = found if isinstance(found, tuple) else ((X,), {})
    model(*args, **kwargs)
    assert len(plans) == 2
    model(*args, **kwargs)
    assert len(plans) == 2
    assert model.plan is plans[1].plan


def test_a_call_as_before_runs_the_plan_from_before(plans: list[Any]) -> None:
    model = pw.shard(Scaled(), mesh={"x": 2})
    model(X)
    model.eval()
    model(X)
    model.train()
    model(X)
    assert len(plans) == 2
    assert model.plan is plans[0].plan


def test_another_dtype_of_an_input_is_planned_for(plans: list[Any]) -> None:
    f = pw.shard(lambda x: x * 2, mesh={"x": 2})
    for x in (X, X.double(), X):
        assert f(x).dtype is x.dtype
    assert len(plans) == 2


def test_a_call_that_takes_gradients_is_not_one_that_takes_none() -> None:
    model = pw.shard(Scaled().eval(), mesh={"x": 2})
    with torch.no_grad():
        model(X)
    model(X).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_autocast_is_a_plan_of_its_own(plans: list[Any]) -> None:
    model = pw.shard(Scaled(), mesh={"x": 2})
    model(X)
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    assert len(plans) == 2


def test_each_dtype_of_autocast_is_a_plan_of_its_own(plans: list[Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model = pw.shard(copy.deepcopy(plain), mesh={"x": 2})
    x = torch.randn(4, 8)
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                found, expected = model(x), plain(x)
            assert found.dtype is dtype
            torch.testing.assert_close(found, expected)
            for y, net in ((found, model), (expected, plain)):
                net.zero_grad()
                y.float().square().sum().backward()
            torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=2e-2, atol=1e-2)
    assert len(plans) == 2


class Twice(TorchFunctionMode):
    """Multiplies what relu gives."""

    def __init__(self, factor: float = 2) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.relu else result


def relu(x: Any) -> Any:
    return torch.relu(x)


def test_what_a_function_mode_changes_is_planned_for(plans: list[Any]) -> None:
    model = pw.shard(relu, mesh={"dp": 2}, in_strategy=(("dp", None),))
    for mode in (contextlib.nullcontext(), Twice(), contextlib.nullcontext(), Twice(), Twice(3), torch.device("meta")):
        with mode:
            expected = torch.relu(X)
            torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    assert len(plans) == 4  # a mode that is like another one has its plan


class Seen(TorchDispatchMode):
    """Sees operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Negated(Seen):
    """Changes what relu gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.ops.aten.relu.default else result


def test_a_dispatch_mode_sees_no_planning_and_is_said() -> None:
    model = pw.shard(relu, mesh={"dp": 2}, in_strategy=(("dp", None),))
    said = "TorchDispatchMode Negated is on while relu is planned: it sees the operators that Partway runs, on parts"
    with Negated(), pytest.warns(UserWarning, match=said):
        model(X)
    torch.testing.assert_close(model(X), X, rtol=0, atol=0)


def test_a_dispatch_mode_of_pytorch_is_not_said(recwarn: pytest.WarningsRecorder) -> None:
    model = pw.shard(nn.Linear(8, 8), mesh={"dp": 2}, in_strategy=(("dp", None),))
    with FlopCounterMode(display=False) as counter:
        model(X)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8
    assert not [str(w.message) for w in recwarn if "TorchDispatchMode" in str(w.message)]


def test_a_parameter_that_was_replaced_is_used(plans: list[Any]) -> None:
    model = pw.shard(Scaled().eval(), mesh={"x": 2})
    model(X)
    with torch.no_grad():
        model.inner[0].weight = nn.Parameter(torch.zeros(8, 8))
        model.inner[0].bias = nn.Parameter(torch.ones(8))
    assert model(X) == 32
    assert len(plans) == 1  # the same shapes and flags


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Any) -> Any:
        return sum(p * x for p in self.parameters())


def test_a_parameter_that_was_added_is_used() -> None:
    model = pw.shard(Shifted(), mesh={"x": 2})
    assert torch.equal(model(X), X * 2)
    model.register_parameter("more", nn.Parameter(torch.ones(8)))
    assert torch.equal(model(X), X * 3)


def test_a_module_that_was_replaced_is_used(plans: list[Any]) -> None:
    model = pw.shard(Scaled().eval(), mesh={"x": 2})
    model(X)
    model.inner[0] = nn.Linear(8, 8).eval()
    nn.init.zeros_(model.inner[0].weight)
    nn.init.ones_(model.inner[0].bias)
    assert model(X) == 32
    assert len(plans) == 1


def test_a_call_inside_a_transform_is_not_one_like_the_last(plans: list[Any]) -> None:
    f = pw.shard(lambda x: x.sum(), mesh={"x": 2})
    assert f(X) == 32
    assert torch.equal(torch.func.vmap(f)(torch.ones(3, 4, 8)), torch.full((3,), 32.0))
    assert f(X) == 32
    assert len(plans) == 1


def test_planning_inside_a_transform_is_refused() -> None:
    with pytest.raises(
        pw.StrategyError, match=r"inside a transform of torch.func \(vmap, grad, jvp, ...\); plan outside"
    ):
        torch.func.vmap(lambda x: pw.compile(torch.sum, (x,), mesh={"x": 2}) and x)(torch.ones(3, 4, 8))
