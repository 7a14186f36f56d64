"""Two small image classifiers in plain PyTorch: nothing in them knows that they will be split.

Both take images (batch, 1, 8, 8) and, in training, labels (batch,). They return the loss and the logits; without
labels, the logits alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """The last layer of both networks, and the loss."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, classes)

    def features(self, images: Tensor) -> Tensor:
        """One vector of size `dim` for each image."""
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
        logits = self.head(self.features(images))
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each on a normalized input and added to it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(Classifier):
    """A vision transformer: patches of 2 x 2 pixels become tokens (Dosovitskiy et al., 2021)."""

    def __init__(self, dim: int = 64, depth: int = 2, heads: int = 4, classes: int = 10) -> None:
        super().__init__(dim, classes)
        self.patches = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.5 * torch.randn(16, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def features(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.norm(self.blocks(tokens)).mean(1)


class BasicBlock(nn.Module):
    """Two convolutions, each with batch normalization, beside a shortcut (He et al., 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(Classifier):
    """A residual network of basic blocks; its batch statistics are those of the whole batch, however it is split."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__(2 * channels, classes)
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(BasicBlock(channels, channels, 1), BasicBlock(channels, 2 * channels, 2))

    def features(self, images: Tensor) -> Tensor:
        return self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3))
