"""Values that a gradient does not pass.

partway::constant(x)             x, which no gradient passes however often it is differentiated. `detach` stands in
                                 traced graphs for what autograd keeps, too, where a second gradient passes
partway::stationary(x, refused)  x, which the first gradient does not pass: it would be zero in the end. A second
                                 one would not, and passes, or is refused in these words
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
