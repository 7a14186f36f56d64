"""Gradients of gradients of sharded modules are those of one device: gradient penalties, Hessian-vector products, inner
steps of MAML, and what torch.autograd and torch.func make of a sharded call."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
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
from partway.runtime.tensors.batched import one_by_one
from partway.runtime.torch_internals import add_batch_dim, remove_batch_dim

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


def several(model: Any, x: Tensor) -> Any:
    """Several tangents at once."""
    x = x.clone().requires_grad_()
    y, rows = model(x).sum(0), torch.eye(4, dtype=x.dtype)
    return (
        torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True),
        torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(rows),
        torch.autograd.grad(y, list(model.parameters()), rows, is_grads_batched=True),
        torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, vectorize=True),
    )


def functional(model: Any, x: Tensor) -> Any:
    """What torch.autograd.functional makes of a model."""

    def loss(x: Tensor) -> Tensor:
        result: Tensor = model(x).square().sum()
        return result

    return (
        torch.autograd.functional.hessian(loss, x[:, :2].repeat(1, 3), vectorize=True),
        torch.autograd.functional.hvp(loss, x, x),
        torch.autograd.functional.vhp(loss, x, x),
        torch.autograd.functional.jvp(model, x, x),
    )


def per_sample(model: Any, x: Tensor) -> Any:
    """Gradients of each sample by itself, and what else torch.func makes of a model with given parameters."""
    own = dict(model.named_parameters())
    given = {name: p.detach() for name, p in own.items()}

    def loss(given: Any, x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, given, (x,)).square().mean()
        return result

    each = torch.func.vmap(torch.func.grad(lambda given, x: loss(given, x[None])), in_dims=(None, 0))
    return each(given, x), torch.func.grad(loss)(own, x), torch.func.grad_and_value(loss)(given, x)


def transformed(model: Any, x: Tensor) -> Any:
    return (
        torch.func.grad(lambda x: model(x).square().sum())(x),
        torch.func.hessian(lambda x: model(x).square().sum())(x[:2]),
        torch.func.jvp(model, (x,), (x,)),
        torch.func.vjp(model, x)[1](model(x).detach()),
        torch.func.vmap(model)(x[None]),
        # nothing of the call is transformed itself
        torch.func.grad(lambda factor: (model(x) * factor).sum())(x[0, :1]),
    )


def dual(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))))


USES: list[Use] = [penalty, product, third, inner_step, several, functional, per_sample, transformed, dual]


@pytest.mark.parametrize("mesh", [DATA, TENSOR, MIXED, UNEVEN], ids=["data", "tensor", "mixed", "uneven"])
@pytest.mark.parametrize("use", USES)
def test_uses_are_those_of_one_device(use: Use, mesh: dict[str, int]) -> None:
    assert_alike(use, *pair("mlp", mesh))


@pytest.mark.parametrize("mesh", [DATA, MIXED, UNEVEN], ids=["data", "mixed", "uneven"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"mlp"}))
def test_gradient_penalties_of_layers_are_those_of_one_device(name: str, mesh: dict[str, int]) -> None:
    assert_alike(penalty, *pair(name, mesh))


def on_processes(use: str, name: str, mesh: dict[str, int]) -> None:
    warnings.filterwarnings(
        "ignore", "`torch.jit.script` is deprecated", DeprecationWarning
    )  # torch's own, of transforms
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


# -- Random numbers, buffers, hooks


def test_every_gradient_of_a_parameter_is_multiplied_by_the_parts_of_the_batch() -> None:
    """With gradients_mean=False, also where gradients are differentiated again: through their own program, and through
    that of the first backward."""
    found: dict[bool, list[Tensor]] = {}
    for mean in (True, False):
        pw.set_auto_parallel_context(gradients_mean=mean)
        torch.manual_seed(0)
        model = pw.shard(mlp().double(), mesh={"dp": 2}, in_strategy=(("dp", None),))
        parameters, loss = [*model.parameters()], model(torch.randn(4, 6, dtype=torch.float64)).square().mean()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum((gradient.square().sum() for gradient in first), torch.zeros(()))
        found[mean] = [*first, *torch.autograd.grad(penalty, parameters)]
    expected = zip(found[True], 4 * [2] + 4 * [2 * 2 * 2], strict=True)
    torch.testing.assert_close(found[False], [gradient * factor for gradient, factor in expected])


def test_the_gradient_draws_the_forwards_random_numbers_again() -> None:
    """With dropout the numbers of a call do not depend on the layout, so that one device has the same mask."""
    plain = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Dropout(0.4), nn.Linear(16, 4), nn.Dropout(0.2)).double()
    x = torch.randn(8, 6, dtype=torch.float64)

    def use(model: Any, x: Tensor) -> Any:
        before, x = torch.get_rng_state(), x.clone().requires_grad_()
        y = model(x)
        after = torch.get_rng_state()
        assert not torch.equal(before, after)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        torch.rand(3)
        torch.set_rng_state(after)
        (once,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(first, once, rtol=1e-12, atol=1e-12)
        return y, first, torch.autograd.grad(first.square().sum(), [x, *model.parameters()]), torch.rand(1)

    assert_alike(use, split(plain, {"dp": 1, "tp": 1}, {}, 2), split(plain, MIXED, {"0.weight": ("tp", None)}, 2), x)


def test_hooks_that_observe_see_a_call_once() -> None:
    seen: list[int] = []
    model = mlp().double()
    model[0].register_forward_hook(lambda module, args, result: seen.append(1))
    sharded, x = pw.shard(model, mesh=DATA), torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sharded(x).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert len(seen) == 1


def test_gradients_that_wait_come_with_one_that_is_differentiated_again() -> None:
    plain, model, x = pair("mlp", DATA)
    with model.no_sync():
        model(x).sum().backward()
    model(x + 1).sum().backward(create_graph=True)
    (plain(x).sum() + plain(x + 1).sum()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.detach(), other.grad, rtol=1e-10, atol=1e-12)


def test_a_changed_parameter_is_an_error_where_the_forward_runs_again() -> None:
    _, model, x = pair("mlp", DATA)
    loss = model(x).sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(pw.RuntimeStateError, match=r"parameter 0\.bias was changed in place after the forward"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_transforms_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, x = pair("mlp", DATA)
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("partway"), "handle", lambda record: lines.append(record.getMessage()))
    for _ in range(2):
        torch.func.vmap(model)(x[None])
    assert lines == ["Sequential is transformed (torch.func, forward_ad): these calls run whole, not split"]


# -- What has no second derivative


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Cube.apply(x)  # type: ignore[no-untyped-call]
        return result


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * x
        y.register_hook(lambda g: 2 * g)
        return y


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x.sin())


class Alignment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores, lengths = x.view(8, 1, 6).log_softmax(-1), torch.tensor([8])
        return F.ctc_loss(scores, torch.tensor([[1, 2]]), lengths, torch.tensor([2]))


REFUSED = {
    "a torch.autograd.Function": Applies,
    "a hook that changes gradients": Hooked,
    "_cdist_backward, of which PyTorch has no derivative": Distances,
    "the CTC loss, whose gradient PyTorch cannot differentiate": Alignment,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_differentiated_again_is_refused_by_name(what: str) -> None:
    plain = REFUSED[what]()
    model = pw.shard(copy.deepcopy(plain), mesh=DATA, in_strategy=(("dp", None),))
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    expected, found = (torch.autograd.grad(one(x).sin().sum(), x)[0] for one in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(pw.RuntimeStateError, match="cannot be differentiated again: it has " + what):
        torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)


@pytest.mark.parametrize("mesh", [DATA, MIXED, UNEVEN], ids=["data", "mixed", "uneven"])
@pytest.mark.parametrize("over", [0, 1], ids=["summed_over", "another"])
def test_a_variance_over_a_dim_that_is_split_is_differentiated_again(mesh: dict[str, int], over: int) -> None:
    plain, x = Variance(0), torch.randn(64, 6, dtype=torch.float64)
    strategy = (("dp", None) if over == 0 else (None, "dp"),)
    model = pw.shard(copy.deepcopy(plain), mesh=mesh, in_strategy=strategy, out_strategy=strategy)

    def use(model: Any, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)

    assert_alike(use, plain, model, x)
    assert bool(model.plan.collectives) is (over == 0)


def test_batched_gradients_reach_the_threads_in_which_autograd_runs_what_lies_on_gpus() -> None:
    """Such a thread is not told of the batch that the caller's `is_grads_batched=True` has begun."""
    found: list[Tensor] = []

    def double(tangents: Any) -> Any:
        return [tangents[0] * 2, None]

    def backward(x: Tensor) -> None:
        once, twice = add_batch_dim(x, 0, 1), add_batch_dim(add_batch_dim(x, 0, 1), 0, 2)
        (first, absent), (second, _) = one_by_one(double, [once]), one_by_one(double, [twice])
        assert absent is None
        assert first is not None
        assert second is not None
        found.append(remove_batch_dim(first, 1, 2, 0))
        found.append(remove_batch_dim(remove_batch_dim(second, 2, 3, 0), 1, 2, 0))

    x = torch.randn(2, 3, 4)
    thread = threading.Thread(target=backward, args=(x,))
    thread.start()
    thread.join()
    assert len(found) == 2
    for value in found:
        torch.testing.assert_close(value.view_as(x), x * 2)
