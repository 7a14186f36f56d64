"""Values that a process keeps for as long as a process group lasts: its DeviceMeshes, groups by name, its watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_KEPT: dict[Callable[[], Any], tuple[Any, Any]] = {}  # by the function that made it: the process group, and the value


def of_world(make: Callable[[], T]) -> T:
    """The result of `make`, which is called once for the current default process group, or for there being none."""
    group, kept = _KEPT.get(make, (make, None))
    if group is not dist.group.WORLD:
        group, kept = _KEPT[make] = dist.group.WORLD, make()
    value: T = kept
    return value


def last(make: Callable[[], T]) -> T | None:
    """The last result of `make`, perhaps for a process group that has ended; None if it was never called."""
    value: T | None = _KEPT.get(make, (None, None))[1]
    return value
