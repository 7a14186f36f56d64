"""The inputs and outputs of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import fx


class Role(StrEnum):
    """What an input of a graph is, or what becomes of an output."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor that the function closes over
    INPUT = "input"
    RESULT = "result"
    LEFT = "left"  # a tensor that the function leaves behind, as in an attribute of a module
    BUFFER_UPDATE = "buffer update"
    INPUT_UPDATE = "input update"


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph: its node, its role, and the name a person knows it by."""

    node: fx.Node
    role: Role
    name: str
    argument: str = ""  # inputs of the call: the parameter that the tensor belongs to
    requires_grad: bool = False
