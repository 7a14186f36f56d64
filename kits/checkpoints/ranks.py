"""Messages between the processes of a launcher while they save and load; none for one process.

They first meet by agreement, which tells which ranks are missing and why. After that another thread may go on during
the training, so it has a process group of its own, on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from partway.runtime import launched, timeout_of, watch
from partway.runtime.ranks import first_line
from partway.strategy import RuntimeStateError

T = TypeVar("T")


class Ranks:
    """The processes: `rank` of `size`. `together` runs a step on each."""

    def __init__(self) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if launched():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = _group(dist.group.WORLD)

    def together(self, step: str, run: Callable[[], T]) -> list[T]:
        """Return the results of `run` on all ranks, by rank, when it has ended on each. If it fails on some, every rank
        raises: those their error, the others RuntimeStateError with `step`, such as "write the checkpoint at x"; if a
        rank has ended, the others raise a RuntimeStateError that says so."""
        mine: Any = None
        error: Exception | None = None
        try:
            mine = run()
        except Exception as raised:
            error = raised
        said = (mine, f"{type(error).__name__}: {error}" if error else "")
        every: list[Any] = [said]
        if self._group is not None:
            every = [None] * self.size
            try:
                dist.all_gather_object(every, said, self._group)
            except RuntimeError as broken:  # of a rank that has ended, gloo's message only has a line of its own source
                raise error or RuntimeStateError(
                    f"rank {self.rank} could not {step}, since it no longer reaches every rank: {first_line(broken)}\n"
                    f"the other ranks:\n{watch().others()}"
                ) from broken
        if error:
            raise error
        failed = next((rank for rank, (_, text) in enumerate(every) if text), None)
        if failed is not None:
            raise RuntimeStateError(f"rank {failed} could not {step}: {every[failed][1]}")
        return [value for value, _ in every]

    def each(self, step: str, run: Callable[[], T]) -> T:
        """Return the result of `run` on this rank, when it has ended on all; the result is not sent."""
        results: list[T] = []
        self.together(step, lambda: results.append(run()))
        return results[0]

    def first(self, step: str, run: Callable[[], T]) -> T:
        """Return the result of `run` on rank 0, on all ranks."""
        given = self.together(step, run if self.rank == 0 else lambda: None)
        value: Any = given[0]
        return value  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def _group(world: Any) -> Any:
    """A process group on CPUs for the ranks of `world`."""
    timeout = max(timeout_of(world), timedelta(minutes=30))
    return watch().together(
        "connect the processes for checkpoints", lambda: dist.new_group(backend="gloo", timeout=timeout)
    )
