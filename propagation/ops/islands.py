"""The call of an island, a program of one rank that a person wrote by hand (`pw.manual`), on whole tensors.

    partway::island(operands, key)   the results of the island called `key`

The key is a digest of all that the island is. A graph with the call is a plain list of calls and can be kept on disk;
the next start traces the same island, and finds it under the same key. Lowering writes the island in its place.

    partway::alike(x, largest, least, name)   x, of which all ranks should have the same: of their values these are the
                                              largest and the least. Written with PARTWAY_VERIFY=1 only
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...strategy.errors import RuntimeStateError, VerifyError, shown
from .keyed import ISLANDS
from .registration import define


class IslandFacts(Protocol):
    """What the call itself needs to know of an island."""

    @property
    def word(self) -> str:
        """What plans call it."""
        ...

    @property
    def results(self) -> Sequence[Any]:
        """What each result is: `shape` of the whole tensor, `dtype` and `device`."""
        ...


def keep(key: str, island: IslandFacts) -> None:
    """Let the island be known by its key. An equal one that is known already stays."""
    ISLANDS.setdefault(key, island)


def island_of(key: str) -> Any:
    """The island called `key`. Raises RuntimeStateError for a key that was not made in this process."""
    if key not in ISLANDS:
        raise RuntimeStateError(
            f"partway::island is called with {shown(key)}, which is not the key of an island that was traced in this "
            "process; call the function that pw.manual made"
        )
    return ISLANDS[key]


def _fake_island(operands: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in island_of(key).results]


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
    """A gradient passes as it is."""


# -- The operators

alike = define(
    "alike(Tensor x, Tensor largest, Tensor least, str name) -> Tensor", _alike, _fake_alike, backward=_alike_backward,
    keep=_keep_nothing,
)  # fmt: skip
island = define("island(Tensor[] operands, str key) -> Tensor[]", fake=_fake_island)
