"""A convolution that pads its operand, by a number or by elements of its own, as one operator.

    partway::padded_convolution(x, weight, bias, pad, mode, value, stride, dilation, groups)
                     torch.nn.functional.pad(x, pad, mode, value), convolved without padding

`rules/padded_convolution.py` makes one of a pad and a convolution, so that both take one exchange of windows; lowering
writes it as those two again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_LIBRARY.define(
    "padded_convolution(Tensor x, Tensor weight, Tensor? bias, int[] pad, str mode, float value, int[] stride, "
    "int[] dilation, int groups) -> Tensor"
)
padded_convolution = torch.ops.partway.padded_convolution.default


def _padded_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pad: list[int], mode: str, value: float, stride: list[int],
    dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    x = F.pad(x, pad, mode, value if mode == "constant" else None)
    run: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    made: Tensor = run(x, weight, bias, stride, 0, dilation, groups)
    return made


_LIBRARY.impl("padded_convolution", _padded_convolution, "CompositeImplicitAutograd")
