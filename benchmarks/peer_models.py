"""The models that the peers' figures are of, in plain PyTorch: they plan on the meta device and run on real tensors.
(ResNet-50 is in `partway.measure.workloads`.)

Every model takes its input and its target, and returns the loss. Names of parameters are what the annotations of
`plan_quality.py` match: `w1.weight`, `blocks.0.q.weight`, `wte.weight`, ...
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partway.measure.workloads import Linear


class MLP(nn.Module):
    """1024 -> 4096 -> 4096 -> 1024 with biases, ReLU between, and the mean squared error.

    `first` computes the first layer of an input, a weight and a bias: the place for an annotation of that operator.
    """

    def __init__(self, sizes: tuple[int, int, int, int] = (1024, 4096, 4096, 1024), first: Linear = F.linear) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(a, b) for a, b in pairwise(sizes))
        self.first = first

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = F.relu(self.first(x, self.w1.weight, self.w1.bias))
        return F.mse_loss(self.w3(F.relu(self.w2(hidden))), target)


class Block(nn.Module):
    """A transformer block, normalized before each half: attention, then `w2(gelu(w1(x)))`.

    fused    one projection `qkv` in place of `q`, `k` and `v`
    causal   a token attends to those before it only
    first    computes the projections `q` and `w1`: the place for an annotation of those operators
    """

    def __init__(
        self, width: int, heads: int, inner: int, *, causal: bool, fused: bool = False, first: Linear = F.linear
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.fused, self.first = heads, causal, fused, first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o, self.w1, self.w2 = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attention(self.norm1(x)))
        hidden = F.gelu(self.first(self.norm2(x), self.w1.weight, self.w1.bias), approximate="tanh")
        out: Tensor = x + self.w2(hidden)
        return out

    def attention(self, x: Tensor) -> Tensor:
        parts = (
            self.qkv(x).chunk(3, -1)
            if self.fused
            else (self.first(x, self.q.weight, self.q.bias), self.k(x), self.v(x))
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """GPT-2 with learned positions, a head tied to the token embedding, and the mean cross-entropy.

    67.4 M parameters as it stands.
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 768,
        heads: int = 12,
        sequence: int = 512,
        vocabulary: int = 50304,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width, causal=True, fused=fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Encoder(nn.Module):
    """Encoder blocks of full attention, and the mean squared error. `first` is that of block 0 alone."""

    def __init__(self, layers: int, width: int = 1024, heads: int = 16, first: Linear = F.linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, causal=False, first=first if i == 0 else F.linear) for i in range(layers)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


class ConvStack(nn.Module):
    """Six 3x3 convolutions with ReLU between, two of which halve height and width, and the mean squared error."""

    CHANNELS = (3, 16, 32, 32, 64, 64, 3)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2 if i in (1, 3) else 1, padding=1)
            for i, (a, b) in enumerate(pairwise(self.CHANNELS))
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), target)
