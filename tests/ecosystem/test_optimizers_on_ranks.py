"""Every optimizer of torch.optim, in each implementation that a CPU has, and common ones of others, on weights that are
whole, and split evenly and unevenly along each dim: the weights of one device, through a state_dict."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn

import partway as pw

Ranks = Callable[..., list[Any]]
Make = Callable[[Any], torch.optim.Optimizer]
EXACT = 1e-9
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "even": {"0.weight": ("dp", None), "2.weight": (None, "dp")},
    "uneven": {"0.weight": (None, "dp"), "0.bias": ("dp",), "2.weight": ("dp", None), "2.bias": ("dp",)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "LBFGS": {"lr": 0.5, "max_iter": 3},
}
LEFT_OUT = ("Optimizer", "SparseAdam")  # gradients of a sharded call are dense, and SparseAdam wants sparse ones


def net() -> nn.Sequential:
    """Weights of [12, 9] and [7, 12]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 7)).double()


class Lion(torch.optim.Optimizer):
    """As of its paper (arXiv 2302.06675), in the way that people write it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = average.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.mul_(1 - 0.1 * group["lr"]).add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class Shampoo(torch.optim.Optimizer):
    """Inverse roots of the products of gradients, on both sides (arXiv 1802.09568)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                for dim in range(g.dim()):
                    size = g.shape[dim]
                    kept = state.setdefault(f"factor_{dim}", 1e-3 * torch.eye(size, dtype=g.dtype))
                    matrix = g.transpose(0, dim).reshape(size, -1)
                    kept.add_(matrix @ matrix.t())
                    values, vectors = torch.linalg.eigh(kept)
                    root = vectors @ torch.diag(values.clamp(min=1e-9) ** (-1 / (2 * g.dim()))) @ vectors.t()
                    g = (root @ g.transpose(0, dim).reshape(size, -1)).view_as(g.transpose(0, dim)).transpose(0, dim)
                p.add_(g, alpha=-group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Slow weights around SGD (arXiv 1907.08610)."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.base, self.steps = torch.optim.SGD(params, lr=0.1), 0
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (arXiv 2405.15682)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                x = (y - 0.1 * z) / 0.9
                z.sub_(y.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                y.copy_(0.9 * x + 0.1 * z)


def of_transformers(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=0.01, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]


def makers() -> dict[str, Make]:
    found: dict[str, Make] = {"Lion": Lion, "Shampoo": Shampoo, "Lookahead": Lookahead, "ScheduleFree": ScheduleFree}
    found["Adafactor of transformers"] = of_transformers
    for name, kind in vars(torch.optim).items():
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer) or name in LEFT_OUT:
            continue
        names = inspect.signature(kind).parameters
        ways: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}] if "foreach" in names else [{}]
        if "fused" in names and name in ("SGD", "Adam", "AdamW", "Adagrad"):  # of these a CPU has a kernel
            ways.append({"fused": True})
        for way in ways:
            options = {**OPTIONS.get(name, {"lr": 0.01}), **way}
            found[" ".join([name, *way, *map(str, way.values())])] = lambda params, k=kind, o=options: k(params, **o)
    return found


def trained(model: Any, name: str) -> tuple[list[Tensor], list[Any]]:
    """Weights and states after 2 steps, a state_dict, and 2 steps more."""
    make = makers()[name]
    ps = [p for p in model.parameters() if "Muon" not in name or p.ndim == 2]  # Muon is for matrices
    optimizer = make(ps)
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    for i in range(4):
        x = torch.randn(6, 9, dtype=torch.float64, generator=generator)

        def closure(x: Tensor = x, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), torch.arange(6))
            loss.backward()
            return loss

        if "LBFGS" in name:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if i == 1 and "Lookahead" not in name:  # which keeps weights beside its states
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(ps)
            optimizer.load_state_dict(state)
    return whole([p.detach() for p in model.parameters()]), whole(list(optimizer.state.values()))


def check(name: str, devices: int) -> None:
    expected = trained(net(), name)
    for layout, plan in LAYOUTS.items():
        for parallel in (False, True) if layout == "whole" else (False,):
            pw.set_auto_parallel_context(device_num=devices, enable_parallel_optimizer=parallel)
            model = pw.shard(net(), mesh={"dp": devices}, in_strategy=(("dp", None),), parameter_plan=plan or None)
            found = trained(model, name)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=EXACT, atol=EXACT, msg=lambda m, w=f"{layout} {parallel}": f"{name}, {w}: {m}"
                )


FAST = (
    "Adafactor foreach False", "AdamW foreach False", "AdamW foreach True", "AdamW fused True", "LBFGS", "Lion", "Muon",
    "Shampoo", "SGD fused True",
)  # fmt: skip
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in makers()]


@pytest.mark.gloo
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_optimizer_trains_as_on_one_device(name: str, ranks: int, on_ranks: Ranks) -> None:
    on_ranks(ranks, check, name, ranks)
