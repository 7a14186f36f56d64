"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LONGEST = 10  # one in so many is left out of a mean


def seconds_of(
    run: Callable[[], Any],
    device: str,
    repeats: int,
    ready: Callable[[], Any] = lambda: None,
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """The `middle` of the times of `run`, after two calls to warm up; `ready` comes before each."""
    times = []
    for _ in range(repeats + 2):
        ready()
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return middle(times[2:])


def mean_but_longest(times: Sequence[float]) -> float:
    """The mean of `times` without the longest tenth."""
    return statistics.fmean(sorted(times)[: len(times) - len(times) // LONGEST])


def wait_for(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
