"""Small nets of the kinds that large images are trained with, and their inputs.

Each takes an image and a target and returns the loss. Channels are few: how an image is split does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ConvNextConfig, ConvNextForImageClassification

from partway.measure.workloads import ResNet50

CLASSES = 3


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """One minus the Dice coefficient, by sums over the whole map."""
    found, wanted = logits.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1).to(logits.dtype)
    both, each = (found * wanted).sum((0, 2, 3)), (found + wanted).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / (each + 1)).mean()


def maps_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of class maps, some of whose pixels are ignored, and Dice."""
    return F.cross_entropy(logits, target.masked_fill(target == CLASSES, -100)) + dice(logits, target % CLASSES)


class ResNet(ResNet50):
    """ResNet-50 with few channels."""

    def __init__(self) -> None:
        super().__init__(width=4, classes=CLASSES)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return super().forward(image, target)


class Double(nn.Sequential):
    """Twice a convolution, a batch norm and a ReLU."""

    def __init__(self, before: int, after: int) -> None:
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Pools down, transposed convolutions or bilinear interpolation up, and what was before each pool beside it."""

    def __init__(self, width: int = 4, levels: int = 3, bilinear: bool = False) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.first = Double(3, width)
        self.downs = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        self.ups, self.joins = nn.ModuleList(), nn.ModuleList()
        for a, b in pairwise(widths[::-1]):
            self.ups.append(nn.Conv2d(a, b, 1) if bilinear else nn.ConvTranspose2d(a, b, 2, 2))
            self.joins.append(Double(2 * b, b))
        self.head, self.bilinear = nn.Conv2d(width, CLASSES, 1), bilinear

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        kept = [self.first(image)]
        for down in self.downs:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            beside = kept.pop()
            x = up(x)
            if self.bilinear or x.shape[2:] != beside.shape[2:]:
                x = F.interpolate(x, size=beside.shape[2:], mode="bilinear", align_corners=False)
            x = join(torch.cat([beside, x], 1))
        return maps_loss(self.head(x), target)


class DeepLab(nn.Module):
    """Dilated convolutions side by side on one tensor with group norms, and global context beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, 2, padding=2), nn.GroupNorm(2, 8), nn.SiLU())
        self.branches = nn.ModuleList(
            nn.Conv2d(8, 4, 3, padding=dilation, dilation=dilation, bias=False) for dilation in (1, 2, 4, 6)
        )
        self.context = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU())
        self.norm, self.head = nn.InstanceNorm2d(16, affine=True), nn.Conv2d(20, CLASSES, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.stem(image)
        found = F.gelu(self.norm(torch.cat([branch(x) for branch in self.branches], 1)))
        context = self.context(x).expand(-1, -1, *x.shape[2:])
        x = self.head(torch.cat([found, context], 1))
        return maps_loss(F.interpolate(x, size=image.shape[2:], mode="bilinear", align_corners=True), target)


class Inverted(nn.Module):
    """EfficientNet's block: widen, a depthwise convolution, attention to channels, narrow."""

    def __init__(self, channels: int, after: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = 3 * channels
        self.widen = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(inner, inner, kernel, stride, padding=kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.SiLU(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, channels, 1), nn.SiLU())
        self.excite = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.widen(x))
        y = self.narrow(y * self.excite(self.squeeze(y)))
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    """Inverted blocks with kernels of 3 and 5, and a classifier behind a global pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, padding=1, bias=False), nn.BatchNorm2d(4), nn.Hardswish())
        self.blocks = nn.Sequential(Inverted(4, 4, 3, 1), Inverted(4, 6, 5, 2), Inverted(6, 6, 3, 1))
        self.last = nn.Sequential(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.SiLU())
        self.head = nn.Linear(12, CLASSES)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(image))).mean((2, 3))
        return F.cross_entropy(self.head(x), target)


class ConvNext(nn.Module):
    """Transformers' ConvNeXt: patches by a strided convolution, depthwise kernels of 7, layer norms of channels."""

    def __init__(self) -> None:
        super().__init__()
        config = ConvNextConfig(
            num_stages=2, hidden_sizes=[8, 12], depths=[1, 2], num_labels=CLASSES, patch_size=4, drop_path_rate=0.0
        )
        self.net = ConvNextForImageClassification(config)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(image).logits, target)


@dataclass(frozen=True)
class Image:
    """A net, the height and width of its images, and whether its target is a map."""

    build: Callable[[], nn.Module]
    size: tuple[int, int]
    maps: bool

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype)

    def batch(self, size: Sequence[int] | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """One image, or images of another `size`, and the target."""
        torch.manual_seed(1)
        height, width = size or self.size
        image = torch.randn(1, 3, height, width, dtype=dtype, requires_grad=True)
        shape = (1, height, width) if self.maps else (1,)
        return {"image": image, "target": torch.randint(0, CLASSES + self.maps, shape)}


NETS = {
    "resnet50": Image(ResNet, (64, 128), False),
    "unet": Image(UNet, (32, 128), True),
    "unet bilinear": Image(lambda: UNet(bilinear=True), (32, 128), True),
    "convnext": Image(ConvNext, (64, 128), False),
    "deeplab": Image(DeepLab, (32, 128), True),
    "efficientnet": Image(EfficientNet, (32, 128), False),
}
