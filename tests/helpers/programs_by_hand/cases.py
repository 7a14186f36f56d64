"""What a program is: its function, and the case that it is written for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MARK = re.compile(r"#\s*wrong: ([A-Z_]+)$")


@dataclass(frozen=True)
class Case:
    """What programs compute.

    whole         it, on one device
    args          its arguments; floats are made float64 in tests
    in_strategy   how programs get them
    out_strategy  how they return its results
    mesh          sizes of axes
    """

    whole: Callable[..., Any]
    args: tuple[Tensor, ...]
    in_strategy: tuple[Any, ...]
    out_strategy: tuple[Any, ...] | None
    mesh: dict[str, int]


@dataclass(frozen=True)
class Program:
    """A program of one rank. `told` is whether a wrong one is explained, or only found."""

    fn: Callable[..., Any]
    case: Case
    told: bool = True

    @property
    def name(self) -> str:
        """That of its function."""
        return self.fn.__name__

    @property
    def marks(self) -> set[tuple[str, int]]:
        """The mistakes that its lines have, by name and number."""
        lines, first = inspect.getsourcelines(self.fn)
        found = [(number, _MARK.search(line.rstrip())) for number, line in enumerate(lines, first)]
        return {(mark[1], number) for number, mark in found if mark}


RIGHT: list[Program] = []
WRONG: list[Program] = []


def right(case: Case) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a right program."""
    return lambda fn: (RIGHT.append(Program(fn, case)), fn)[1]


def wrong(case: Case, told: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a wrong program."""
    return lambda fn: (WRONG.append(Program(fn, case, told)), fn)[1]


def random(*sizes: int) -> Tensor:
    """A tensor of random numbers, others each time."""
    return torch.randn(*sizes, generator=_GENERATOR)


def integers(high: int, *sizes: int) -> Tensor:
    """A tensor of random integers below `high`."""
    return torch.randint(high, sizes, generator=_GENERATOR)


_GENERATOR = torch.Generator().manual_seed(0)
