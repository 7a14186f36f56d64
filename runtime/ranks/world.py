"""What a process keeps for as long as a process group lasts: its DeviceMeshes, groups by name, its watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_KEPT: dict[Callable[[], Any], tuple[Any, Any]] = {}  # by what made it: for which process group, and what


def of_world(make: Callable[[], T]) -> T:
    """What `make` gives, which is asked once for the default process group that there is, or for there being none."""
    group, kept = _KEPT.get(make, (make, None))
    if group is not dist.group.WORLD:
        group, kept = _KEPT[make] = dist.group.WORLD, make()
    value: T = kept
    return value


def last(make: Callable[[], T]) -> T | None:
    """What `make` gave last, perhaps for a process group that has ended; None where it was never asked."""
    value: T | None = _KEPT.get(make, (None, None))[1]
    return value
