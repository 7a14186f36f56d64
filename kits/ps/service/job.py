"""The description of a job: it must be the same for all its processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from partway.ps.service.pieces import Parameter, RowRange, divide

MODES = ("sync", "async")


@dataclass(frozen=True)
class Job:
    """The facts on which the processes of a job have to agree.

    optimizer      the name of its class
    options        the initial options of each of its groups of parameters
    by_element     its step of a row does not depend on other rows
    mode           one of MODES
    max_staleness  of a push in async mode; None: any
    durability     what the servers' records survive: see shelf.py
    """

    parameters: tuple[Parameter, ...]
    optimizer: str
    options: tuple[dict[str, Any], ...]
    by_element: bool
    mode: str = "sync"
    max_staleness: int | None = None
    durability: str = "process"

    @property
    def pieces(self) -> tuple[RowRange, ...]:
        """The pieces into which its parameters are divided."""
        return divide(self.parameters, self.by_element)

    def size(self, piece: RowRange) -> int:
        """The size of a piece's values in bytes."""
        return (piece.stop - piece.start) * self.parameters[piece.parameter].row_bytes

    @property
    def fingerprint(self) -> str:
        """The identity of this job's records. The options of the optimizer may change."""
        facts = [[asdict(parameter) for parameter in self.parameters], self.optimizer, self.by_element, self.mode]
        return hashlib.sha256(json.dumps([*facts, version("partway")]).encode()).hexdigest()

    def differs(self, other: Job) -> str | None:
        """Why a worker with `other` does not fit; None if it does."""
        mine, theirs = self.parameters, other.parameters
        if len(mine) != len(theirs):
            return f"the optimizer has {len(theirs)} parameters, not {len(mine)}"
        for one, two in zip(mine, theirs, strict=True):
            if one != two:
                return f"parameter {two.name} is {_described(two)}, not {_described(one)}"
        facts: Sequence[tuple[str, Any, Any]] = (
            ("the optimizer", self.optimizer, other.optimizer),
            ("mode", self.mode, other.mode),
            ("max_staleness", self.max_staleness, other.max_staleness),
            ("durability", self.durability, other.durability),
        )
        return next((f"{what} is {b}, not {a}" for what, a, b in facts if a != b), None)


def _described(parameter: Parameter) -> str:
    kept = "by rows" if parameter.by_rows else "on the workers" if parameter.on_workers else "on the servers"
    return f"{parameter.name} {parameter.dtype}{list(parameter.shape)} {kept} (group {parameter.group})"
