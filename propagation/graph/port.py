"""The inputs and outputs of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import fx


class Role(StrEnum):
    """The role of an input or an output of a graph."""

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
    """One input or output of a graph: its node, its role, and its name for users."""

    node: fx.Node
    role: Role
    name: str
    argument: str = ""  # inputs of the call: the parameter that the tensor belongs to
    requires_grad: bool = False
