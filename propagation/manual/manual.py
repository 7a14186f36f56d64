"""A manual function: a program of one rank that a user wrote by hand, with the layouts of its operands and results."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

import torch

from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import REPLICATE
from ..graph.graph import Graph

_LOCAL = ("locals", "lambda")  # words of `<locals>.<lambda>`


@dataclass(frozen=True)
class Crossing:
    """An operand or a result of a manual function: its name in messages, its layout, and the shape of the whole.

    Its ranks hold slices or the whole; those of a result may also hold addends.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def parted(self) -> frozenset[str]:
        """The axes on which ranks hold slices or addends."""
        return frozenset(self.layout.mesh.axes) - self.whole

    @property
    def whole(self) -> frozenset[str]:
        """The axes on which each rank holds all of it."""
        placed = zip(self.layout.mesh.axes, self.layout.placements, strict=True)
        return frozenset(axis for axis, placement in placed if placement == REPLICATE)


@dataclass(frozen=True)
class TracedManual:
    """A traced manual function. `graph` is the program of one rank, of local tensors; all ranks run the same."""

    name: str
    mesh: Mesh
    operands: tuple[Crossing, ...]
    results: tuple[Crossing, ...]
    graph: Graph

    @property
    def word(self) -> str:
        """Its name in plans: the last word of its name."""
        words: list[str] = re.findall(r"\w+", self.name)
        return next((word for word in reversed(words) if word not in _LOCAL), "manual")

    @cached_property
    def key(self) -> str:
        """A digest of all its contents."""
        needing = [port.requires_grad for port in self.graph.inputs]
        text = f"{self.name}\n{self.mesh}\n{self.operands}\n{self.results}\n{needing}\n{self.graph.module.graph}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        return f"manual function {self.name} on ({self.mesh})\n{self.graph}"
