"""The memory that a rank may use: of a GPU the part that is free or held by this process; of a host its memory, divided
among the processes on it."""

from __future__ import annotations

import functools
import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .agreement import gathered

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container


@functools.lru_cache(maxsize=16)
def memory_of_a_rank(kind: str, among: tuple[int, ...] | None = None) -> float:
    """The bytes that every rank (or each of the ranks `among`) may use on its device, "cpu" or "cuda": those of the
    rank with the least. All of them call it at the same place. They are counted once in a process, so that all plans
    are made for the same memory."""
    answers = gathered("count the memory of its device", _mine(kind), among)
    return rounded_down(min(shares(answers)))


def _mine(kind: str) -> list[Any]:
    """The host and the device of this process, and the bytes of the device."""
    if kind == "cuda":
        free, _ = torch.cuda.mem_get_info()
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # processes may see theirs as number 0
        return [socket.gethostname(), str(gpu), free + torch.cuda.memory_reserved()]
    return [socket.gethostname(), kind, host_memory()]


def shares(answers: Sequence[Sequence[Any]]) -> list[float]:
    """The bytes for each process, from (host, device, bytes): processes on one device share it evenly."""
    together = Counter((host, device) for host, device, _ in answers)
    return [size / together[host, device] for host, device, size in answers]


def host_memory() -> float:
    """The bytes that processes on this host may use together: the machine's, or the limit of their container."""
    most = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # no such file, or "max"
        most = min(most, float(int(_CGROUP.read_text())))
    return most


def rounded_down(size: float) -> float:
    """`size` rounded down to two digits: a plan should not change with every megabyte that another process takes."""
    unit = 10.0 ** (math.floor(math.log10(size)) - 1)
    return math.floor(size / unit) * unit
