"""Small networks whose steps are timed operator by operator; `partway calibrate` fits the rates of operators to them.

Each calls many operators once or a few times, at one size; together their tensors range from those in a core's cache to
those that fit no cache. The operators of a user's network are among them, at other sizes, or have the rates of their
kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partway.measure.workloads import Bottleneck, UNet, Workload, attention, gpt2

ACTIVATIONS: Sequence[Callable[[Tensor], Tensor]] = (
    torch.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.tanh, torch.sigmoid, F.leaky_relu,
    F.softplus, F.elu, F.hardswish, F.relu6,
)  # fmt: skip
FUNCTIONS: Sequence[Callable[[Tensor], Tensor]] = (
    torch.exp, torch.abs, torch.neg, torch.sqrt, torch.rsqrt, torch.log, torch.sin, torch.cos, torch.square,
    lambda x: x.pow(3), lambda x: x.clamp(0.2, 0.8), lambda x: 1 / x, lambda x: x - 0.5, lambda x: x / 3,
    lambda x: x + x.detach(), lambda x: x * x.detach(), lambda x: torch.where(x > 0.5, x, 0.0),
    lambda x: x.masked_fill(x < 0.5, 0.0), lambda x: torch.maximum(x, 1 - x), lambda x: F.dropout(x, 0.1),
)  # fmt: skip
ALONG: Sequence[Callable[[Tensor], Tensor]] = (
    lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.cumsum(-1), lambda x: x.sum(-1),
    lambda x: x.sum(0), lambda x: x.mean(-1), lambda x: x.amax(-1), lambda x: x.var(-1), lambda x: x.t().contiguous(),
    lambda x: torch.cat([x, x]), lambda x: F.pad(x, (1, 1)), lambda x: x[:, 1:], lambda x: x.flip(0),
    lambda x: x.chunk(2, -1)[0] * 2, lambda x: x.expand(2, -1, -1) * 2,
    lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: F.rms_norm(x, x.shape[-1:]),
)  # fmt: skip


class ProbeFunctions(nn.Module):
    """Each function by itself, applied to a product with a matrix of its own, as in a network: so its operand is where
    products leave it, and the core's caches have lost its code. Without `width` rows are too long for a product."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]], width: int = 0) -> None:
        super().__init__()
        self.functions, self.scale = functions, nn.Parameter(torch.ones(()))
        weights = (torch.rand(width, width) / (width / 2) for _ in functions if width)  # rows stay between 0 and 1
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `x`, [N, width], of numbers between 0 and 1."""
        x, loss = x * self.scale, torch.zeros((), device=x.device)
        for i, function in enumerate(self.functions):
            result = function(x @ self.weights[i] if len(self.weights) else x * 1.5)
            loss = loss + F.mse_loss(result, torch.zeros_like(result))
        return loss


class Lookups(nn.Module):
    """Rows of tables: embeddings, and values by their indices."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.values = nn.Embedding(rows, width), nn.Parameter(torch.rand(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of `ids`, [N]."""
        by_place = self.values.gather(0, ids[:, None].expand(-1, self.values.shape[1]))
        found = self.table(ids), self.values[ids], self.values.index_select(0, ids), by_place
        loss: Tensor = sum((each.square().mean() for each in found), torch.zeros((), device=ids.device))
        return loss


class Products(nn.Module):
    """Matrix products of the shapes (m, k, n), by columns and by rows, with a bias and without one, and in batches."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=i % 2 == 0) for i, (_, k, n) in enumerate(shapes))
        self.shapes = shapes
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `x`, a vector as long as the largest operand."""
        x, loss = x * self.scale, torch.zeros((), device=x.device)
        for (rows, inner, _), layer in zip(self.shapes, self.layers, strict=True):
            y = x[: rows * inner].view(rows, inner)
            loss = loss + layer(y).square().mean()
            if rows * inner % 8 == 0 and rows <= 512 and inner <= 1024:
                part = y.view(8, -1, inner) if rows % 8 == 0 else y.view(1, rows, inner)
                loss = loss + (part @ part.transpose(1, 2)).square().mean()
        return loss


class GatedBlock(nn.Module):
    """Norms of the root mean square, rotated queries and keys, causal attention and a gated perceptron, as in Llama."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, 3 * width), (width, 3 * width), (3 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `x`, [batch, tokens, width]."""
        y = _normalized(x, self.scale1)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1], device=x.device)[:, None] / 100.0 ** torch.linspace(0, 1, q.shape[-1]).to(
            x.device
        )
        q, k = (part * angle.cos() + _turned(part) * angle.sin() for part in (q, k))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(x.shape))
        y = _normalized(x, self.scale2)
        loss: Tensor = (x + self.down(F.silu(self.gate(y)) * self.up(y))).square().mean()
        return loss


class Attentions(nn.Module):
    """Attention to all tokens, and to the earlier ones only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `x`, [batch, heads, tokens, width]."""
        x, loss = x * self.scale, torch.zeros((), device=x.device)
        for causal in (False, True):
            loss = loss + F.scaled_dot_product_attention(x, x, x, is_causal=causal).square().mean()
        return loss


def _normalized(x: Tensor, scale: Tensor) -> Tensor:
    return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Convolutions(nn.Module):
    """Convolutions of many kinds, each of the same images, with group norms, pools and a change of size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        kinds: tuple[tuple[int, int, int, int], ...] = (
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 2, 1, 1),
            (7, 2, 3, 1),
            (3, 1, 1, channels),
        )
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Conv2d(channels, channels, kernel, stride, padding, groups=groups)
            for kernel, stride, padding, groups in kinds
        )
        self.up, self.norm = nn.ConvTranspose2d(channels, channels, 2, 2), nn.GroupNorm(4, channels)

    def forward(self, images: Tensor) -> Tensor:
        """The loss of `images`, [N, 3, H, W]."""
        x = F.silu(self.norm(self.enter(images)))
        made = [layer(x) for layer in self.layers]
        made += [self.up(x), F.avg_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 1)]
        made += [
            F.interpolate(x, scale_factor=2.0, mode="nearest"),
            F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        ]
        loss: Tensor = sum((each.square().mean() for each in made), torch.zeros((), device=x.device))
        return loss


class Bottlenecks(nn.Module):
    """Two blocks of a ResNet, the second with a stride, and a mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.blocks = nn.Sequential(Bottleneck(channels, channels // 2, 1), Bottleneck(2 * channels, channels, 2))

    def forward(self, images: Tensor) -> Tensor:
        """The loss of `images`, [N, 3, H, W]."""
        loss: Tensor = self.blocks(self.enter(images)).mean((2, 3)).square().mean()
        return loss


T = TypeVar("T")

SHAPES = (
    (16, 64, 64), (8, 1024, 1024), (64, 256, 1024), (128, 768, 768), (256, 2048, 512), (512, 512, 2048),
    (512, 768, 8192), (1024, 1024, 1024), (2048, 128, 256), (4096, 256, 64), (256, 768, 40000),
    (64, 512, 1001), (256, 256, 99), (512, 768, 8193), (256, 768, 20001),
)  # fmt: skip
MORE_SHAPES = (
    (4, 64, 10),
    (256, 256, 256),
    (512, 3072, 768),
    (768, 2304, 768),
    (2048, 1024, 1024),
    (1024, 4096, 1024),
    (32, 256, 35),
    (1024, 256, 30001),
)
ROWS, NUMBERS = (1, 16, 256), (1 << 21, 9 << 20)  # rows of 1024 numbers; and numbers without products


def probes(times: int = 1, *, quick: bool) -> Iterator[Workload]:
    """The networks with their batches, larger by a factor `times`; `quick`: fewer, and smaller ones."""
    yield from _of_functions(quick, times)
    yield from _of_layers(quick, times)


def _of_functions(quick: bool, times: int) -> Iterator[Workload]:
    for name, functions in (("activations", ACTIVATIONS), ("functions", FUNCTIONS), ("along", ALONG)):
        for rows in ROWS:
            yield _of(name, partial(ProbeFunctions, functions, 1024), torch.rand, (rows * times, 1024))
        for n in NUMBERS[: 1 if quick or times > 1 else 2]:
            yield _of(name, partial(ProbeFunctions, functions), torch.rand, (n * times >> 10, 1024))


def _of_layers(quick: bool, times: int) -> Iterator[Workload]:
    def unless(*more: T) -> tuple[T, ...]:
        return () if quick else more

    for shapes in (SHAPES, *unless(MORE_SHAPES)):
        larger = tuple((m * times, k, n) for m, k, n in shapes)
        yield _of("products", partial(Products, larger), torch.rand, (max(m * k for m, k, _ in larger),))
    for rows, width, count in ((1000, 64, 64), (10000, 512, 512), (50000, 256, 4096), *unless((50000, 768, 512))):
        yield _of("lookups", partial(Lookups, rows, width), partial(torch.randint, rows), (count * times,))
    for width, heads, batch, tokens in ((128, 4, 2, 64), (512, 8, 2, 256), *unless((768, 12, 4, 256))):
        yield _of("gated", partial(GatedBlock, width, heads), torch.rand, (batch * times, tokens, width))
    for batch, *rest in ((8, 3, 50, 64), (4, 8, 128, 64), (2, 4, 256, 32), (1, 2, 1024, 64), *unless((1, 8, 2048, 64))):
        yield _of("attentions", Attentions, torch.rand, (batch * times, *rest))
    more = unless((128, 768, 50000, 2), (512, 512, 4000, 4))
    for tokens, width, vocabulary, batch in ((64, 128, 1000, 2), (256, 256, 8000, 2), (256, 256, 17000, 2), *more):
        yield gpt2(1, tokens, width, vocabulary, each=batch * times)
    for channels, pixels, batch in ((16, 16, 2), (32, 64, 2), *unless((64, 96, 4))):
        shape = (batch * times, 3, pixels, pixels)
        yield _of("convolutions", partial(Convolutions, channels), torch.randn, shape)
    wider = unless((512, 32, 4), (256, 128, 2), (256, 28, 4))
    for channels, pixels, batch in ((32, 32, 2), (128, 64, 2), (512, 16, 4), (512, 12, 4), (64, 12, 2), *wider):
        shape = (batch * times, 3, pixels, pixels)
        for parts in (0, batch):
            yield _of("bottlenecks", partial(Bottlenecks, channels), torch.randn, shape, parts)
    for width, pixels, batch in ((8, 32, 2), *unless((24, 96, 2))):
        yield _unet(width, pixels, batch * times)


def _of(
    name: str, build: Callable[[], nn.Module], draw: Callable[..., Tensor], shape: tuple[int, ...], parts: int = 0
) -> Workload:
    """A probe. `parts` of the batch have statistics of their own; 0: it has those of one device."""
    return Workload(name, build, lambda _: (draw(shape),), parts or shape[0], (len(shape),), parts > 0)


def _unet(width: int, pixels: int, batch: int) -> Workload:
    def images(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, 3, pixels, pixels), torch.randint(2, (batch, pixels, pixels))

    return Workload("unet", lambda: UNet(width, 2), images, batch, (4, 3))
