"""A convolution that pads its operand, with a number or with the operand's elements, as one operator.

    partway::padded_convolution(x, weight, bias, pad, mode, value, stride, dilation, groups)
                     torch.nn.functional.pad(x, pad, mode, value), convolved without padding

`rules/layers/padded_convolution.py` fuses a pad and a convolution into one, so that they need one exchange of windows;
lowering writes it as the two again.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .registration import define


def _padded_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pad: list[int], mode: str, value: float, stride: list[int],
    dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    x = F.pad(x, pad, mode, value if mode == "constant" else None)
    run: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    result: Tensor = run(x, weight, bias, stride, 0, dilation, groups)
    return result


# -- The operators

padded_convolution = define(
    "padded_convolution(Tensor x, Tensor weight, Tensor? bias, int[] pad, str mode, float value, int[] stride, "
    "int[] dilation, int groups) -> Tensor",
    _padded_convolution,
    composite=True,
)
