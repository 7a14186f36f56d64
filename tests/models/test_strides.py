"""Values that lie in memory otherwise than new ones: residuals over permutations, before kernels that read strides."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn

import partway as pw
from partway.strategy.errors import CaptureError

TRIPS: dict[str, Callable[[Tensor], Tensor]] = {  # x is [batch, channel, height, width] before and after
    "channels last": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape),
    "memory format": lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
    "transposed image": lambda x: (x.mT * 2).contiguous().mT,
    "windows": lambda x: x.unfold(2, 2, 2).permute(0, 2, 4, 1, 3).contiguous().permute(0, 3, 1, 2, 4).reshape(x.shape),
    "steps": lambda x: torch.stack((x, x * x), -1)[..., 0],
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand(x.shape),
}
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "after": lambda x, y: x + y,
    "before": lambda x, y: y + x,
    "times": lambda x, y: torch.relu(y) * x,
}


def _attention(x: Tensor) -> Tensor:
    q = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(q.unsqueeze(1), x.flatten(2).mT.unsqueeze(1), q.unsqueeze(1)).squeeze(1)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "attention": _attention,
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "conv2d": lambda x: F.conv2d(x, x.detach()[0, :, :3, :3].expand(2, -1, -1, -1), padding=1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, x.detach()[:, :2, :2, :2].mean(0).expand(16, 2, 2, 2)),
    "grid_sample": lambda x: F.grid_sample(x, x.detach()[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": F.instance_norm,
    "interpolate bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "interpolate bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda x: F.interpolate(x, scale_factor=2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "softmax": lambda x: x.softmax(1),
}


def program(kernel: str, trip: str = "channels last", residual: str = "after") -> Callable[[Tensor, Tensor], Tensor]:
    """A residual over a permutation, a kernel, and a convolution or product, whose gradient has strides of its own."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = KERNELS[kernel](RESIDUALS[residual](x, TRIPS[trip](x)))
        return F.conv2d(y, w[:, : y.shape[1]]) if y.dim() == 4 else y @ w[:, :, 0, 0].mT

    return f


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 4, 4, dtype=torch.float64, generator=generator)
    w = torch.randn(3, 16, 1, 1, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), w.requires_grad_()


def run(f: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    """The value and its gradients; what comes in is transposed."""
    y = f(x, w)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape[::-1]).permute(*range(y.dim())[::-1])
    return [y.detach(), *torch.autograd.grad(y, (x, w), weights)]


def check(f: Callable[..., Tensor], **given: Any) -> None:
    expected = run(f, *tensors())
    for found, right in zip(run(pw.shard(f, **given), *tensors()), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_residual_over_a_permutation_before_a_kernel_has_the_gradients_of_one_device(kernel):
    check(program(kernel), mesh={"x": 4})


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, ("x",), (None, "x"), (None, None, "x")], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_residual_before_every_kernel_has_the_gradients_of_one_device(kernel, split):
    given = {"in_strategy": {"x": split + (None,) * (4 - len(split))}} if split else {}
    for trip, residual in itertools.product(TRIPS, RESIDUALS):
        check(program(kernel, trip, residual), mesh={"x": 4}, **given)


@pytest.mark.parametrize("mesh", [{"x": 8}, {"a": 2, "b": 4}], ids=str)
@pytest.mark.parametrize("norm", ["group_norm", "layer_norm"])
def test_a_norm_of_three_samples_that_no_axis_divides(norm, mesh):
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x + TRIPS["channels last"](x)
        return F.conv2d(F.group_norm(y, 4) if norm == "group_norm" else F.layer_norm(y, y.shape[1:]), w)

    x, w = tensors()
    x = x.detach()[:3].requires_grad_()
    for found, right in zip(run(pw.shard(f, mesh=mesh), x, w), run(f, x, w), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_statistics_and_weights_that_are_slices_with_steps():
    """PyTorch's kernels read vectors as if they were dense."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        mean, weight, bias = w[0, ::4, 0, 0].detach(), w[1, ::4, 0, 0], w[2, ::4, 0, 0]
        var = (w * w + 0.5)[0, ::4, 0, 0].detach()
        return F.batch_norm(x.movedim(-1, 1), mean, var, weight, bias)

    check(f, mesh={"x": 2})
    check(f, mesh={"x": 2}, in_strategy={"x": ("x", None, None, None)})


def ranks() -> None:
    for kernel, trip in (("group_norm", "channels last"), ("layer_norm", "windows"), ("max_pool2d", "memory format")):
        f = program(kernel, trip)
        x, w = tensors()
        sharded = pw.shard(f, {"x": (None, None, None, None)}, mesh={"x": 2})
        for found, right in zip(run(sharded, x, w), run(f, *tensors()), strict=True):
            torch.testing.assert_close(whole(found), right, rtol=1e-9, atol=1e-9)


@pytest.mark.gloo
def test_residuals_over_permutations_have_the_gradients_of_one_device_on_two_processes(on_ranks):
    on_ranks(2, ranks)


def test_saved_values_that_lose_their_strides_get_them_back():
    """As PyTorch's save_on_cpu does to them."""
    f = program("group_norm")
    x, w = tensors()
    y = pw.shard(f, mesh={"x": 4})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        found = run(y, x, w)
    for value, right in zip(found, run(f, *tensors()), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9)


# -- Random numbers of PyTorch's, which are laid in memory one after another ------------------------------------------


class Own(nn.Module):
    """A function of one tensor, as a module whose parameter gets a gradient."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.scale = f, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x * self.scale)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.Dropout(0.3), nn.AlphaDropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 5, 2, batch_first=batch_first, dropout=0.4, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x)[0], 0.2)


def _filled(x: Tensor) -> Tensor:
    return torch.empty_like(x).normal_() * x + torch.zeros_like(x).exponential_()


DRAWING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.memory_format]] = {
    "dropout": (lambda: Own(lambda x: F.dropout(x.t(), 0.5)), (4, 6), torch.contiguous_format),
    "dropout of what is expanded": (
        lambda: Own(lambda x: F.dropout(x[:, None].expand(4, 5, 6).transpose(0, 2))), (4, 6), torch.contiguous_format,
    ),
    "like": (lambda: Own(lambda x: torch.rand_like(x.t()) + torch.randn_like(x.t()) * x.t()), (4, 6),
             torch.contiguous_format),
    "of values": (lambda: Own(lambda x: torch.bernoulli(x.t().sigmoid()) + F.rrelu(x.t(), training=True)), (4, 6),
                  torch.contiguous_format),
    "in place": (lambda: Own(lambda x: _filled(x.t())), (4, 6), torch.contiguous_format),
    "image": (Image, (4, 3, 6, 6), torch.contiguous_format),
    "image, channels last": (lambda: Image().to(memory_format=torch.channels_last), (4, 3, 6, 6), torch.channels_last),
    "LSTM": (lambda: Recurrent(False), (4, 5, 6), torch.contiguous_format),
    "LSTM, batch first": (lambda: Recurrent(True), (4, 5, 6), torch.contiguous_format),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3), (4, 5, 8), torch.contiguous_format),
    "encoder, batch first": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), (4, 5, 8),
                             torch.contiguous_format),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("LSTM")) for n in DRAWING])
def test_what_pytorch_draws_is_what_the_plain_model_draws_however_its_tensors_lie(name):
    build, size, lies = DRAWING[name]
    pw.set_auto_parallel_context(random_numbers="torch")
    torch.manual_seed(0)
    plain = build().double()
    x = torch.randn(size, dtype=torch.float64).contiguous(memory_format=lies)
    found = []
    for model in (plain, pw.shard(copy.deepcopy(plain), mesh={"x": 2})):
        torch.manual_seed(3)
        y = model(x)
        y.sin().sum().backward()
        torch.manual_seed(3)
        with torch.no_grad():
            found.append([y.detach(), model(x), *(p.grad for p in model.parameters())])
    for value, right in zip(*found, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)


def test_a_call_with_other_strides_draws_what_pytorch_draws_for_these():
    pw.set_auto_parallel_context(random_numbers="torch")
    sharded = pw.shard(F.dropout, mesh={"x": 2})
    x = torch.randn(8, 4)
    for given in (x, x.t().contiguous().t(), x, x.repeat(1, 2)[:, ::2]):
        torch.manual_seed(1)
        expected = F.dropout(given)
        torch.manual_seed(1)
        assert torch.equal(sharded(given), expected)


def test_as_strided_of_a_slice_is_refused():
    sharded = pw.shard(lambda x: x[:, :-1].as_strided((4, 2), (2, 1)), mesh={"x": 2})
    with pytest.raises(CaptureError, match=r"as_strided in the function takes \[4, 2\] out of the memory of a tensor"):
        sharded(torch.randn(4, 4))


# -- What comes out --------------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "a transposed product": lambda x: (x.flatten(1) @ x.flatten(1).t()).t() * 2,
    "channels last": lambda x: F.conv2d(x.contiguous(memory_format=torch.channels_last), x[:, :, :2, :2].detach()),
    "a permutation": lambda x: x.permute(3, 1, 0, 2) + 1,
    "the argument": lambda x: x.mT,
}


@pytest.mark.parametrize("split", [None, ("x",), (None, "x")], ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_lies_in_memory_as_on_one_device(name, split):
    f = RESULTS[name]
    x = tensors()[0].detach()
    given = {"in_strategy": {"x": split + (None,) * (4 - len(split))}} if split else {}
    sharded = pw.shard(f, mesh={"x": 2}, **given)
    for given_x in (x, x.clone().requires_grad_()):
        expected, found = f(given_x), sharded(given_x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.stride() == expected.stride()
