"""How many rows each expert, and each group of devices, got in the steps of a block.

Of 8 experts on 4 ranks, and 12 rows of which expert 5 gets 6, the busiest rank has 7 of the 12 rows: 2.33 times the
mean of 3, the least `expert_load` that would have allowed for it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...propagation.ops.keyed import LISTENERS, NUMBERS
from ...propagation.plan.load import ExpertLoad
from .agreement import gathered


@contextlib.contextmanager
def record_expert_load() -> Iterator[list[ExpertLoad]]:
    """Count the rows that the experts get in the forwards inside the block. The list, with one ExpertLoad for each
    mixture that ran, is filled when the block ends, which all ranks do together under a launcher.

    It takes a few microseconds for each mixture on the CPU; on a GPU the host waits for the router.
    """
    own: dict[tuple[str, int], Tensor] = {}

    def hear(layer: str, first: int, rows: Tensor) -> None:
        known = own.get((layer, first))
        own[layer, first] = rows.long() if known is None else known + rows

    loads, number = list[ExpertLoad](), next(NUMBERS)
    LISTENERS[number] = hear
    try:
        yield loads
    finally:
        del LISTENERS[number]
    mine: list[Any] = [[layer, first, rows.tolist()] for (layer, first), rows in own.items()]
    every: dict[str, dict[int, list[list[int]]]] = {}
    for said in gathered("count rows", mine) if dist.is_initialized() else [mine]:
        for layer, first, rows in said:
            every.setdefault(layer, {}).setdefault(first, []).append(rows)
    for layer, parts in every.items():
        added = [[sum(counts) for counts in zip(*parts[first], strict=True)] for first in sorted(parts)]
        loads.append(ExpertLoad(layer, tuple(itertools.chain(*added)), tuple(map(sum, added))))
