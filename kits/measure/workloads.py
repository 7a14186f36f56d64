"""Models for measurements, in plain PyTorch, and the user's own: each takes its batch and returns the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partway.commands import find, kind_of
from partway.ops import combine, dispatch, grouped_matmul
from partway.strategy import RuntimeStateError

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# -- A decoder ---------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token attends to those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class DecoderBlock(nn.Module):
    """Attention and `down(gelu(up(x)))`, each after a norm. `enter` does nothing: tensor parallelism by hand uses it to
    sum the gradients of the inputs of the column-split layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2, self.enter = nn.LayerNorm(width), nn.LayerNorm(width), nn.Identity()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block of `x`, [batch, tokens, width]."""
        normal = self.enter(self.norm1(x))
        q, k, v = (part(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        hidden = F.gelu(self.up(self.enter(self.norm2(x))), approximate="tanh")
        result: Tensor = x + self.down(hidden)
        return result


class DecoderModel(nn.Module):
    """The shapes of GPT-2: learned positions, a head tied to the token embedding, and the mean cross-entropy."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", torch.arange(sequence), persistent=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """The mean loss of predicting `target` from `ids`, both [batch, tokens]."""
        x = self.wte(ids) + self.wpe(self.positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; version 1.5 has its stride on the 3x3."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.conv1, self.norm1 = nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3, self.norm3 = nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out)
        changes = stride > 1 or channels_in != out
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block of `x`, [N, C, H, W]."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 v1.5 with the statistics of the batch, and the mean cross-entropy.

    `first` computes the classifier: the place for an annotation of that operator.
    """

    def __init__(self, width: int = 64, classes: int = 1000, first: Linear = F.linear) -> None:
        super().__init__()
        self.first = first
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)
        blocks, channels_in = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                channels = width << stage
                blocks.append(Bottleneck(channels_in, channels, 2 if i == 0 and stage else 1))
                channels_in = 4 * channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        """The mean loss of `images`, [N, 3, H, W], for the classes `target`, [N]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        features = self.blocks(x).mean((2, 3))
        return F.cross_entropy(self.first(features, self.fc.weight, self.fc.bias), target)


# -- A U-Net -----------------------------------------------------------------------------------------------------------


class DoubleConvolution(nn.Module):
    """Two 3x3 convolutions, each with batch normalization and ReLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The block of `x`, [N, C, H, W]."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015) with `levels` levels, each of half the height and width and twice the
    channels of the one above, and the mean cross-entropy of a class for each pixel.

    Height and width of the images must be multiples of 2 ** levels.
    """

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 2, channels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in pairwise([channels, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(DoubleConvolution(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def logits(self, images: Tensor) -> Tensor:
        """A number for each class and pixel: [N, classes, H, W]."""
        x, seen = images, []
        for block in self.down[:-1]:
            seen.append(block(x))
            x = F.max_pool2d(seen[-1], 2)
        x = self.down[-1](x)
        for up, join, beside in zip(reversed(self.up), reversed(self.join), reversed(seen), strict=True):
            x = join(torch.cat([beside, up(x)], 1))
        out: Tensor = self.head(x)
        return out

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        """The mean loss of `images`, [N, C, H, W], for the classes `target`, [N, H, W]."""
        return F.cross_entropy(self.logits(images), target)


# -- A perceptron ------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Linear layers with ReLU between, and the mean squared error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean squared error of `x` against `target`, both [N, width]."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


# -- A mixture of experts ----------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A layer of Mixtral's: each token goes to the best `each` of its experts, and the mean squared error."""

    def __init__(self, width: int, hidden: int, experts: int, each: int) -> None:
        super().__init__()
        self.experts, self.each = experts, each
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, hidden) / width**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the experts of each token, and their numbers: [tokens, each]."""
        best = self.router(x).topk(self.each, -1)
        return best.values.softmax(-1), best.indices

    def computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        """The rows after their experts."""
        hidden = F.silu(grouped_matmul(rows, self.gate, ends)) * grouped_matmul(rows, self.up, ends)
        return grouped_matmul(hidden, self.down, ends)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean squared error of what the experts make of `x` against `target`, both [tokens, width]."""
        weights, ids = self.chosen(x)
        rows, ends, where = dispatch(x, ids, self.experts)
        return F.mse_loss(combine(self.computed(rows, ends), where, weights), target)


# -- Models with their batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    build   the model; its forward takes the tensors of `batch` and returns the loss
    batch   the tensors of a batch of a number of samples, all of them split by their first dim
    each    samples for each rank that the batch is split over
    dims    the number of dims of each tensor of the batch
    own_statistics  whether the model has batch norms: DDP, FSDP2 and the program by hand give each rank the statistics
            of its part of the batch, and so does Partway with `batch_norm_parts`; by default it has those of the whole
            batch, like one device
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    each: int
    dims: tuple[int, ...]
    own_statistics: bool = False

    def model(self, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
        """The model, with the same weights in every process."""
        torch.manual_seed(0)
        return self.build().to(device, dtype)

    def tensors(self, samples: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
        """A batch, the same in every process."""
        torch.manual_seed(1)
        return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self.batch(samples))

    def by(self, axis: str | None) -> tuple[tuple[str | None, ...], ...]:
        """`in_strategy` for a batch split over `axis`, or whole."""
        return tuple((axis, *(None,) * (dims - 1)) for dims in self.dims)


def gpt2(layers: int, sequence: int, width: int = 768, vocabulary: int = 50257, each: int = 4) -> Workload:
    """A decoder with heads of 64 (four heads if it is narrower than that)."""

    def build() -> nn.Module:
        return DecoderModel(layers, width, max(4, width // 64), sequence, vocabulary)

    def batch(samples: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(vocabulary, (samples, sequence + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload("gpt2", build, batch, each, (2, 2))


def resnet50(pixels: int, width: int = 64, classes: int = 1000, each: int = 4) -> Workload:
    """ResNet-50 and square images."""

    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 3, pixels, pixels), torch.randint(classes, (samples,))

    return Workload("resnet50", lambda: ResNet50(width, classes), batch, each, (4, 1), own_statistics=True)


def mlp(width: int, layers: int, each: int = 4) -> Workload:
    """A perceptron whose layers are all of one width."""

    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, width), torch.randn(samples, width)

    return Workload("mlp", lambda: Perceptron(width, layers), batch, each, (2, 2))


def mixture(width: int, hidden: int, experts: int, k: int = 2, each: int = 1024) -> Workload:
    """A layer of experts for `each` tokens on every rank, each token with `k` experts."""

    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, width), torch.randn(samples, width)

    return Workload("mixture", lambda: Mixture(width, hidden, experts, k), batch, each, (2, 2))


def tiny(name: str, layers: int = 2) -> Workload:
    """gpt2 (of `layers` layers), resnet50 or mlp with the same structure, small enough to be checked in float64."""
    match name:
        case "gpt2":
            return gpt2(layers, sequence=16, width=32, vocabulary=64)
        case "resnet50":
            return resnet50(pixels=32, width=8, classes=8)
    return mlp(width=64, layers=6)


# -- A model of the user's own -----------------------------------------------------------------------------------------


def own(name: str, each: int = 4) -> Workload:
    """The workload of the function `name`, written as module:function; the current folder is searched too.

    The function is given a number of samples. It returns a model and a tuple of tensors with that many samples along
    their first dim; the model takes the tensors and returns the loss: a mean over the samples, without dropout, so that
    it can be checked. Raises RuntimeStateError if there is no such function, or it returns something else.
    """
    function: Callable[[int], Any] = find(name)

    def checked(samples: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        result = function(samples)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
            raise RuntimeStateError(
                f"{name}({samples}) must return (an nn.Module, a tuple of tensors), not {kind_of(result)}"
            )
        model, batch = result
        if not (isinstance(batch, tuple) and batch and all(isinstance(t, Tensor) for t in batch)):
            raise RuntimeStateError(f"the batch of {name}({samples}) must be a tuple of tensors, not {kind_of(batch)}")
        for i, tensor in enumerate(batch):
            if tensor.dim() == 0 or tensor.shape[0] != samples:
                raise RuntimeStateError(
                    f"tensor {i} of the batch of {name}({samples}) has the shape {tuple(tensor.shape)}; its first dim "
                    f"must have the {samples} samples"
                )
        return model, batch

    model, batch = checked(each)
    norms = any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules())
    return Workload(
        name,
        lambda: checked(each)[0],
        lambda samples: checked(samples)[1],
        each,
        tuple(tensor.dim() for tensor in batch),
        norms,
    )
