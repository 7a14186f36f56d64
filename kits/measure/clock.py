"""Time a function on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LONGEST = 20  # one in so many is left out of a mean


def seconds_of(
    run: Callable[[], Any],
    device: str,
    repeats: int,
    ready: Callable[[], Any] = lambda: None,
) -> float:
    """The median of the times of `run`, after two calls to warm up; `ready` comes before each."""
    times = []
    for _ in range(repeats + 2):
        ready()
        times.append(seconds_of_one(run, device))
    return statistics.median(times[2:])


def seconds_of_one(run: Callable[[], Any], device: str) -> float:
    """The time of one call, after the device has finished its earlier work."""
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def mean_but_longest(times: Sequence[float]) -> float:
    """The mean of `times` without the longest twentieth."""
    return statistics.fmean(sorted(times)[: len(times) - len(times) // LONGEST])


def wait_for(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
