"""Gradients of gradients of sharded modules are those of one device: gradient penalties, Hessian-vector products, inner
steps of MAML, and what torch.autograd and torch.func make of a sharded call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import partway as pw

pytestmark = [
    # what torch.func and forward_ad import warns about itself; a backward with create_graph=True warns of its cycle
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
]

Ranks = Callable[..., list[Any]]
Use = Callable[[Any, Tensor], Any]  # what a model is used for: from a model and a batch to tensors


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)  # a key's bias has no gradient

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, 8))
        return result


class Variance(nn.Module):
    """A norm that is written by hand, over the features; over the batch with `dim=0`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(self.dim, keepdim=True)) / (x.var(self.dim, keepdim=True) + 0.1).sqrt()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), nn.Softplus())


def images(*between: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), *between, nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (mlp, (8, 6), {"0.weight": ("tp", None)}),
    "norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), Variance(), nn.Linear(8, 4)),
        (8, 6),
        {"4.weight": (None, "tp")},
    ),
    "attention": (Attention, (4, 6, 8), {"out.weight": (None, "tp")}),
    "images": (lambda: images(nn.BatchNorm2d(4)), (8, 2, 4, 4), {"0.weight": ("tp", None, None, None)}),
    "evaluated": (lambda: images(nn.BatchNorm2d(4)).eval(), (8, 2, 4, 4), {"0.weight": ("tp", None, None, None)}),
    "groups": (lambda: images(nn.GroupNorm(2, 4)), (8, 2, 4, 4), {"0.weight": ("tp", None, None, None)}),
    "classes": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.LogSoftmax(-1)),
        (8, 6),
        {"2.weight": ("tp", None)},
    ),
}
DATA, TENSOR, MIXED, UNEVEN = {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 1}


def pair(name: str, mesh: dict[str, int]) -> tuple[nn.Module, Any, Tensor]:
    """A model on one device, the same split over `mesh`, and a batch."""
    build, shape, plan = MODELS[name]
    torch.manual_seed(0)
    plain, x = build().double(), torch.randn(shape, dtype=torch.float64)
    return plain, split(plain, mesh, plan, x.dim()), x


def split(plain: nn.Module, mesh: dict[str, int], plan: dict[str, Any], dims: int) -> Any:
    given: dict[str, Any] = {"parameter_plan": plan} if mesh["tp"] > 1 else {}
    if mesh["dp"] > 1:
        given["in_strategy"] = (("dp", *[None] * (dims - 1)),)
    return pw.shard(copy.deepcopy(plain), mesh=mesh, **given)


def assert_alike(use: Use, plain: nn.Module, model: Any, x: Tensor) -> None:
    """`use` of both gives the same numbers, and leaves the same in parameters, their gradients and buffers."""
    values: list[Any] = []
    for one in (plain, model):
        torch.manual_seed(5)
        # the fused kernels of attention have no second derivative on one device
        with sdpa_kernel(SDPBackend.MATH):
            result = use(one, x)
        left = {name: (p, p.grad) for name, p in one.named_parameters()}, dict(one.named_buffers())
        values.append(whole((result, left)))
    torch.testing.assert_close(values[1], values[0], rtol=1e-9, atol=1e-11)


# -- Uses


def penalty(model: Any, x: Tensor) -> Any:
    """The critic's step of WGAN-GP."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        mixed = (x * 0.7).requires_grad_()
        scores = model(mixed)
        (gradient,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
        loss = model(x).mean() + 10 * (gradient.flatten(1).norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, mixed.grad


def product(model: Any, x: Tensor) -> Any:
    """A Hessian-vector product of the parameters, by double backward; gradients lie as the parameters do."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    for gradient, parameter in zip(gradients, parameters, strict=True):
        assert getattr(gradient, "placements", None) == getattr(parameter, "placements", None)
    along = sum((g * (p.detach() + 1)).sum() for g, p in zip(gradients, parameters, strict=True))
    return gradients, torch.autograd.grad(along, parameters)


def third(model: Any, x: Tensor) -> Any:
    parameters, x = list(model.parameters()), x.clone().requires_grad_()
    loss = model(x).square().mean()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second, torch.autograd.grad(second.pow(3).sum(), [x, *parameters])


def inner_step(model: Any, x: Tensor) -> Any:
    """MAML: a step of the inner loop, through which the outer one differentiates."""
    named = dict(model.named_parameters())
    inner = functional_call(model, named, (x,)).square().mean()
    gradients = torch.autograd.grad(inner, list(named.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    outer = functional_call(model, fast, (x + 1,)).square().mean()
    outer.backward()
    return outer.detach()


USES: list[Use] = [penalty, product, third, inner_step]


@pytest.mark.parametrize("mesh", [DATA, TENSOR, MIXED, UNEVEN], ids=["data", "tensor", "mixed", "uneven"])
@pytest.mark.parametrize("use", USES)
def test_uses_are_those_of_one_device(use: Use, mesh: dict[str, int]) -> None:
    assert_alike(use, *pair("mlp", mesh))


@pytest.mark.parametrize("mesh", [DATA, MIXED, UNEVEN], ids=["data", "mixed", "uneven"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"mlp"}))
def test_gradient_penalties_of_layers_are_those_of_one_device(name: str, mesh: dict[str, int]) -> None:
    assert_alike(penalty, *pair(name, mesh))


def on_processes(use: str, name: str, mesh: dict[str, int]) -> None:
    assert_alike(globals()[use], *pair(name, mesh))


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [DATA, TENSOR, MIXED], ids=["data", "tensor", "mixed"])
@pytest.mark.parametrize("use", USES)
def test_uses_on_processes_are_those_of_one_device(on_ranks: Ranks, use: Use, mesh: dict[str, int]) -> None:
    on_ranks(mesh["dp"] * mesh["tp"], on_processes, use.__name__, "mlp", mesh)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["attention", "images", "norm"])
def test_gradient_penalties_of_layers_on_processes(on_ranks: Ranks, name: str) -> None:
    on_ranks(4, on_processes, "penalty", name, MIXED)
