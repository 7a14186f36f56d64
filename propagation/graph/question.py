"""A question of a function about the values of a call, as data: the operators that compute the answer, and its inputs.

Questions arise while a function is captured (`capture/export/questions.py`), and are answered before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..torch_internals import tree_flatten
from .port import Role

Answer = bool | int


@dataclass(frozen=True)
class Leaf:
    """A tensor of a call: an input, by its place, or a parameter or buffer, by its name."""

    role: Role
    name: str
    place: int = -1


Values = Callable[[Leaf], Tensor]


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in the arguments of an operation."""

    place: int


@dataclass(frozen=True)
class Operation:
    """One call of an operator, with slots for its tensors."""

    operator: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]  # the slots of its results


@dataclass(frozen=True, eq=False)
class Question:
    """A question of a function about the values of a call, and the operators that compute the answer.

    draws   whether the answer depends on random numbers, so that each call draws them again
    line    the line of code that asks, as in messages
    late    whether an output of the graph is the answer
    """

    leaves: tuple[tuple[Leaf, int, bool], ...]  # with its slot, and whether an operation writes to it
    operations: tuple[Operation, ...]
    draws: bool
    line: str
    late: bool = False

    def answer(self, values: Values) -> Answer:
        """The answer for a call with these `values`."""
        held: dict[int, Any] = {}
        answer: Any = None
        with torch.no_grad():
            for leaf, slot, written in self.leaves:
                held[slot] = values(leaf).clone() if written else values(leaf)
            for operation in self.operations:
                answer = operation.operator(*_filled(operation.args, held), **_filled(operation.kwargs, held))
                results = (
                    (answer,) if isinstance(answer, Tensor) else tree_flatten(answer)[0] if operation.results else ()
                )
                held.update(zip(operation.results, results, strict=True))
        return cast("Answer", answer)  # the result of the last operation


def _filled(value: Any, held: Mapping[int, Any]) -> Any:
    """The arguments of an operation, with the tensors in `held` in place of slots."""
    kind = type(value)
    if kind is Slot:
        return held[value.place]
    if kind in (list, tuple):
        return kind(_filled(part, held) for part in value)
    return {name: _filled(part, held) for name, part in value.items()} if kind is dict else value
