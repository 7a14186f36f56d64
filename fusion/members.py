"""Members: the collectives of a program that may share a message, as a fusion policy sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..propagation.ops.collectives import kind_of
from ..strategy.placement import Kind

MB = 1024 * 1024

Key = tuple[tuple[str, ...], str, str, torch.dtype]
Groups = tuple[tuple[int, ...], ...]  # positions of members; ascending within a group


@dataclass(frozen=True, slots=True)
class Member:
    """One collective that may join a group: a conversion along `axes`, with the bytes of its payload (of the whole
    value: the result of an all_gather, the operand of the others)."""

    tag: int
    source: str
    target: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    bytes: int

    @property
    def kind(self) -> Kind:
        """The collective that the conversion runs."""
        return kind_of(self.source, self.target)

    @property
    def key(self) -> Key:
        """The key of a group: only members with equal keys can be one collective."""
        return self.axes, self.source, self.target, self.dtype
