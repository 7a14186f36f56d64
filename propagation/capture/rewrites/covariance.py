"""Covariance and correlation in terms of the operators that PyTorch computes them with.

Their checks of weights are questions about values (questions.py), which torch.export would hide inside the operators.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """`torch.cov`. Raises RuntimeError where it does, except for weights of a wrong shape or dtype."""
    if x.dim() > 2 or x.dtype is torch.bool:
        raise RuntimeError(f"cov(): expected two or fewer dimensions of numbers, and got {x.dtype}{list(x.shape)}")
    x = x.reshape(1, -1) if x.dim() < 2 else x
    weights = fweights
    for name, factors in (("fweights", fweights), ("aweights", aweights)):
        if factors is not None and factors.numel() and not factors.min() >= 0:
            raise RuntimeError(f"cov(): {name} cannot be negative")
    if aweights is not None:
        weights = aweights if weights is None else weights * aweights
    weighed = x if weights is None else x * weights
    total = x.shape[1] if weights is None else weights.sum()
    if weights is not None and not total != 0:
        raise RuntimeError("cov(): weights sum to zero, can't be normalized")
    by = total - correction
    if weights is not None and aweights is not None and correction != 0:
        by = total - correction * (weights * aweights).sum() / total
    if by <= 0:
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.",
            stacklevel=2,
        )
        by = 0 * by
    mean = (weighed.sum(1) / total).unsqueeze(1)
    x = x - mean
    return (x @ (x if weights is None else x * weights).t().conj() / by).squeeze()


def corrcoef(x: Tensor) -> Tensor:
    """`torch.corrcoef`."""
    c = cov(x)
    if c.dim() == 0:
        return c / c
    deviation = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / deviation.unsqueeze(1) / deviation
    if c.is_complex():
        return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))
    return c.clip(-1, 1)
