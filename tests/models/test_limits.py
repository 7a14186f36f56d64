"""Steps that keep to a memory limit: the numbers of one device, and no more than the limit, of every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients, assert_same_loss, gradients, whole
from torch import Tensor, nn

import partway as pw
from partway.runtime.executors.peak import held_by
from partway.strategy.errors import DoesNotFitError

SHARE = 0.85  # of what the plan without a limit holds


class Blocks(nn.Module):
    """Blocks with a wide hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(F.silu(up(F.layer_norm(x, (32,))))))
        return x


class Images(nn.Module):
    """Convolutions that read their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + F.gelu(torch.tanh(conv(x)))
        return x


class Experts(nn.Module):
    """Two layers of experts, of which each token has a share."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList(torch.randn(16, 4) for _ in range(2))
        self.up = nn.ParameterList(torch.randn(4, 16, 64) / 4 for _ in range(2))
        self.down = nn.ParameterList(torch.randn(4, 64, 16) / 8 for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            hidden = F.gelu(torch.einsum("bm,emh->ebh", x, up))
            x = x + torch.einsum("be,ebh,ehm->bm", (x @ gate).softmax(-1), hidden, down)
        return x


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "blocks": (Blocks, (256, 32), ("dp", None), {}),
    "weights split at rest": (Blocks, (256, 32), ("dp", None), {"enable_parallel_optimizer": True}),
    "images split by width": (Images, (4, 4, 16, 32), (None, None, None, "dp"), {}),
    "experts": (Experts, (256, 16), ("dp", None), {}),
}


class Loss(nn.Module):
    """The loss of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def built(kind: str) -> tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]:
    """A model of a kind, its batch, and how it is annotated. Sets its options."""
    build, shape, split, options = KINDS[kind]
    pw.set_auto_parallel_context(**options)
    pw.set_algo_parameters(optimizer_states=0)
    if options:
        pw.set_auto_parallel_context(parallel_optimizer_config={"parallel_optimizer_threshold": 0})
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Loss(build()).double()

    return made, x, {"mesh": {"dp": 2, "tp": 2}, "in_strategy": (split,)}


def limited(make: Callable[[], nn.Module], x: Tensor, annotated: dict[str, Any], share: float = SHARE) -> Any:
    """The model, sharded within a share of what it would hold without a limit."""
    free = pw.compile(make(), (x,), **annotated).plan.memory.total
    pw.set_algo_parameters(memory_limit=share * free)
    return pw.shard(make(), **annotated)


def held(model: Any) -> int:
    """What a rank holds at the peak of the step that runs."""
    memory = model.plan.memory
    return memory.parameters + memory.optimizer + memory.inputs + round(held_by(model.program).peak)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_within_a_limit_has_the_numbers_of_one_device(kind: str) -> None:
    make, x, annotated = built(kind)
    model = limited(make, x, annotated)
    loss, expected = gradients(make(), {"x": x})
    found_loss, found = gradients(model, {"x": x})
    assert_same_loss(found_loss, loss, 1e-12)
    assert_same_gradients(found, expected, 1e-12)
    assert model.plan.certificate.binding
    assert held(model) <= pw.get_algo_parameters("memory_limit")
    near = model.plan.memory.total >= 0.9 * pw.get_algo_parameters("memory_limit")
    assert model.plan.memory.total == held(model) or not near


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulate_within_a_limit(kind: str) -> None:
    make, x, annotated = built(kind)
    model, plain = limited(make, x, annotated), make()
    for wait in (True, True, False):
        plain(x).backward()
        if wait:
            with model.no_sync():
                model(x).backward()
        else:
            model(x).backward()
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(two.grad), one.grad, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_within_a_limit_has_the_numbers_of_one_device(kind: str) -> None:
    make, x, annotated = built(kind)
    with torch.no_grad():
        model = limited(make, x, annotated)
        torch.testing.assert_close(whole(model(x)), make()(x), rtol=1e-12, atol=0)
        assert model.plan.memory.total <= pw.get_algo_parameters("memory_limit")


def test_what_cannot_fit_is_an_error_that_says_what_would() -> None:
    make, x, annotated = built("blocks")
    with pytest.raises(DoesNotFitError) as raised:
        limited(make, x, annotated, share=0.5)(x)
    pw.set_algo_parameters(memory_limit=raised.value.enough)
    assert pw.compile(make(), (x,), **annotated).plan.memory.total <= raised.value.enough
