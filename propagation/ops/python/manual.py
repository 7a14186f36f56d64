"""The call of a manual function, a program of one rank that a person wrote by hand (`pw.manual`), on whole tensors.

    partway::manual(operands, key)   the results of the manual function called `key`

The key is a digest of the manual function's contents. A graph with the call is a plain list of calls on disk; the next
start traces the same manual function, and finds it under the same key. Lowering writes the manual function in its
place.

    partway::alike(x, largest, least, name)   x, after a check that it is the same on all ranks: `largest` and `least`
                                              are the extremes over the ranks. Only with PARTWAY_VERIFY=1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....strategy.errors import RuntimeStateError, VerifyError, shown
from ..keyed import MANUALS
from ..registration import define


class ManualFacts(Protocol):
    """The facts about a manual function that its call needs."""

    @property
    def word(self) -> str:
        """Its name in plans."""
        ...

    @property
    def results(self) -> Sequence[Any]:
        """Values with the `shape` of each whole result, its `dtype` and its `device`."""
        ...


def keep(key: str, manual: ManualFacts) -> None:
    """Register the manual function under its key, unless an equal one is registered."""
    MANUALS.setdefault(key, manual)


def manual_of(key: str) -> Any:
    """The manual function called `key`. Raises RuntimeStateError for a key that was not made in this process."""
    if key not in MANUALS:
        raise RuntimeStateError(
            f"partway::manual is called with {shown(key)}, which is not the key of a manual function that was traced "
            f"in this "
            "process; call the function that pw.manual made"
        )
    return MANUALS[key]


def _fake_manual(operands: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in manual_of(key).results]


def _alike(x: Tensor, largest: Tensor, least: Tensor, name: str) -> Tensor:
    if not torch.allclose(largest, least, **_TOLERANCES.get(x.dtype, {}), equal_nan=True):
        apart = (largest.to(torch.float64) - least.to(torch.float64)).abs().nan_to_num(math.inf)
        raise VerifyError(
            f"{name} is said to be whole, the same on every rank, and ranks differ in {int((apart > 0).sum())} of "
            f"{apart.numel()} elements, by up to {float(apart.max()):.3g}; add it up, gather it, or say in "
            "out_strategy how it is split"
        )
    return x.clone()


_TOLERANCES = {torch.float16: {"rtol": 1e-3}, torch.bfloat16: {"rtol": 1.6e-2}, torch.float32: {"rtol": 1.3e-6}}


def _fake_alike(x: Tensor, largest: Tensor, least: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _alike_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, None, None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep nothing: gradients pass unchanged."""


# -- The operators

alike = define(
    "alike(Tensor x, Tensor largest, Tensor least, str name) -> Tensor",
    _alike,
    _fake_alike,
    backward=_alike_backward,
    keep=_keep_nothing,
)
call_manual = define("manual(Tensor[] operands, str key) -> Tensor[]", fake=_fake_manual)
