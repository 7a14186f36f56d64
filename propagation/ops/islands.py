"""The call of an island, a program of one rank that a person wrote by hand (`pw.manual`), on whole tensors.

    partway::island(operands, key)   the results of the island called `key`

The key is a digest of all that the island is. A graph with the call is a plain list of calls and can be kept on disk;
the next start traces the same island, and finds it under the same key. Lowering writes the island in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...strategy.errors import RuntimeStateError, shown
from .registration import define


class Known(Protocol):
    """What the call itself needs to know of an island."""

    @property
    def results(self) -> Sequence[Any]:
        """What each result is: `shape` of the whole tensor, `dtype` and `device`."""


_KNOWN: dict[str, Any] = {}  # by key: the islands that were traced in this process


def keep(key: str, island: Known) -> None:
    """Let the island be known by its key. An equal one that is known already stays."""
    _KNOWN.setdefault(key, island)


def island_of(key: str) -> Any:
    """The island called `key`. Raises RuntimeStateError for a key that was not made in this process."""
    if key not in _KNOWN:
        raise RuntimeStateError(
            f"partway::island is called with {shown(key)}, which is not the key of an island that was traced in this "
            "process; call the function that pw.manual made"
        )
    return _KNOWN[key]


def _fake_island(operands: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in island_of(key).results]


# -- The operator

island = define("island(Tensor[] operands, str key) -> Tensor[]", fake=_fake_island)
