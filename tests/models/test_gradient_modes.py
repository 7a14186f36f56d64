"""torch.no_grad, enable_grad, inference_mode and autocast inside what is captured, nested in each other: numbers and
gradients are those of one device. (All numbers are small whole ones, so that bfloat16 rounds none.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(16, 16), nn.Linear(16, 16), body
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def half(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.relu(net.a(x))
    return y * net.b(x)


@torch.no_grad()
def _stopped(net: Net, x: Tensor) -> Tensor:
    return net.a(x)


def decorated(net: Net, x: Tensor) -> Tensor:
    return _stopped(net, x) * net.b(x)


def set_grad_enabled(net: Net, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = net.a(x)
    torch.set_grad_enabled(before)
    return y * net.b(x)


def enable_inside_no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.a(x)
        with torch.enable_grad():
            z = net.b(x) * y
        w = z * 2
    return w + z


def inference_mode(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = torch.relu(net.a(x))
    return y * 2 + net.b(x)


def in_place_on_its_own(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.a(x)
        y.mul_(2).add_(1)
    return y * net.b(x)


def no_grad_in_autocast(net: Net, x: Tensor) -> Tensor:
    with half():
        with torch.no_grad():
            y = net.a(x)
        z = net.a(x)
    return y.float() + z.float()


def autocast_in_no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad(), half():
        y = net.a(x)
    return y.float() + net.a(x)


def float32_in_autocast(net: Net, x: Tensor) -> Tensor:
    with half():
        y = net.a(x)
        with half(enabled=False), torch.inference_mode():
            z = net.b(x)
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
        w = net.b(x)
    return y.float() + z + w.float()


BODIES = [
    no_grad, decorated, set_grad_enabled, enable_inside_no_grad, inference_mode, in_place_on_its_own,
    no_grad_in_autocast, autocast_in_no_grad, float32_in_autocast,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_numbers_and_gradients_are_those_of_one_device(body: Callable[..., Tensor]) -> None:
    plain = Net(body)
    x = torch.randint(-1, 2, (8, 16)).float()
    model: Any = pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", "tp"),))
    found = []
    for each in (plain, model):
        given = x.clone().requires_grad_()
        result = each(given)
        result.sum().backward()
        found.append([result, given.grad, *(p.grad for p in each.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None) or not (one if other is None else other).any()
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def _scaled(h: Tensor) -> None:
    h.mul_(2)


def _assigned(h: Tensor) -> None:
    h[0] = 1


@pytest.mark.parametrize("write", [_scaled, _assigned])
def test_a_write_that_autograd_does_not_see_is_refused(write: Callable[[Tensor], None]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        with torch.no_grad():
            write(h)
        return h

    with pytest.raises(pw.CaptureError, match="writes in place to a tensor that needs a gradient, where gradients are"):
        pw.compile(fn, (torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)), mesh={"tp": 2})
