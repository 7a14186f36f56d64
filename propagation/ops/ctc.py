"""CTC loss (Graves et al., 2006) with results of static size.

PyTorch's operator saves a tensor for its backward whose size depends on the longest target, and so on the values of the
lengths, which no static graph allows. This one saves nothing, and recomputes that tensor.

    partway::ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
                     log_probs [steps, batch, classes], targets [batch, longest] or concatenated, lengths [batch]
                     -> the loss of each sequence [batch]
    partway::ctc_backward(gradient, ...the same)     -> the gradient of log_probs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import define

aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """torch.nn.functional.ctc_loss, and torch.ctc_loss, whose `reduction` is a number, in terms of `ctc`. Raises
    ValueError for a reduction other than "none", "mean", "sum" and their numbers 0, 1, 2, like PyTorch."""
    if reduction not in ("none", "mean", "sum", 0, 1, 2):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    several = log_probs.dim() == 3
    input_counts, target_counts = (
        torch.as_tensor(lengths, device=log_probs.device).reshape(-1) for lengths in (input_lengths, target_lengths)
    )
    losses: Tensor = ctc(
        log_probs if several else log_probs.unsqueeze(1), targets, input_counts, target_counts, blank, zero_infinity
    )
    if zero_infinity:
        losses = losses.masked_fill(losses == torch.inf, 0.0)
    if reduction in ("mean", 1):
        return (losses / target_counts.clamp(min=1).to(losses.dtype)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if several else losses.squeeze(0)


def _ctc(log_probs: Tensor, *rest: Any) -> Tensor:
    losses: Tensor = aten._ctc_loss.Tensor(log_probs, *rest)[0]
    return losses


def _ctc_backward(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    *targets, blank, zero_infinity = rest
    losses, alphas = aten._ctc_loss.Tensor(log_probs, *rest)
    slopes: Tensor = aten._ctc_loss_backward.Tensor(gradient, log_probs, *targets, losses, alphas, blank, zero_infinity)
    return slopes


def _fake_ctc(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _fake_ctc_backward(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.numbers = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (ctc_backward(gradient, *ctx.saved_tensors, *ctx.numbers), *(None,) * 5)


# -- The operators

_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
)
ctc = define(f"ctc({_ARGUMENTS}) -> Tensor", _ctc, _fake_ctc, backward=_backward, keep=_keep)
ctc_backward = define(f"ctc_backward(Tensor gradient, {_ARGUMENTS}) -> Tensor", _ctc_backward, _fake_ctc_backward)
