"""Values that no gradient passes.

partway::constant(x)             x, without a gradient of any order. (`detach` in traced graphs also marks the tensors
                                 that autograd saves, through which second derivatives pass.)
partway::stationary(x, refused)  x, without a first derivative, since its total would be zero. The second derivative
                                 would not be zero: it passes, or is refused with this message
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import define


def _constant(x: Tensor) -> Tensor:
    return x.clone()


def _fake_constant(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _backward(ctx: Any, grad: Tensor) -> None:
    """There is no gradient."""


def _stationary(x: Tensor, refused: str) -> Tensor:
    return x.detach()


# -- The operators

constant = define("constant(Tensor x) -> Tensor", _constant, _fake_constant, backward=_backward, keep=_keep)
stationary = define("stationary(Tensor(a) x, str refused) -> Tensor(a)", _stationary, composite=True)

NO_GRADIENT = frozenset({torch.ops.aten.detach.default, stationary})
