"""The courses of one function for one signature: what it asked of values, and the plan that each answer led to.

A function that asks nothing has one plan, and a call of it looks at nothing here. What a function does ask
(propagation/questions.py) is asked of every call, in order and before anything runs, and the plan with the same answers
is taken. After the same answers comes the same question, so plans are found as in a tree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from partway.dtensors import is_dtensor
from partway.propagation.graph import Role
from partway.propagation.questions import Answer, Leaf, Question, Unanswered, Values

_MANY = 8  # plans of one signature, after which a warning says what asks


class Course(Protocol):
    """What runs one course."""

    @property
    def asked(self) -> tuple[tuple[Question, Answer], ...]:
        """What was asked in it, with the answers."""


C = TypeVar("C", bound=Course)


class Courses(list[C]):
    """What runs the calls of one signature, one for each course."""

    def of(self, values: Values) -> C | None:
        """The one whose answers are those of `values`; None: none was planned, and no random number was drawn."""
        answers: list[Answer] = []
        draws = any(question.draws for course in self for question, _ in course.asked)
        before = torch.get_rng_state() if draws else None
        open_ = list(self)
        while open_:
            asked = open_[0].asked
            if len(asked) == len(answers):
                return open_[0]
            answers.append(asked[len(answers)][0].answer(values))
            open_ = [course for course in open_ if _agrees(course, answers)]
        if before is not None:
            torch.set_rng_state(before)
        return None

    def add(self, course: C, name: str) -> None:
        """One more, of the function called `name`."""
        self.append(course)
        if len(self) == _MANY:
            lines = {question.line: None for each in self for question, _ in each.asked}
            warnings.warn(
                f"{name} was planned for the {_MANY}th time, because its course depends on values of tensors that "
                f"change from call to call:{''.join(lines)}\nEvery new course is planned anew; do this part outside "
                "the sharded function if that takes too long",
                stacklevel=2,
            )


def _agrees(course: Course, answers: list[Answer]) -> bool:
    return len(course.asked) >= len(answers) and course.asked[len(answers) - 1][1] == answers[-1]


def values_of(tensors: Sequence[Tensor], state: Callable[[str], Tensor], parts: bool = False) -> Values:
    """Where questions find the tensors of a call: the `tensors` given, and the `state` of its module by name. `parts`:
    a process was given its part only."""

    def value(leaf: Leaf) -> Tensor:
        given = leaf.role is Role.INPUT
        tensor = tensors[leaf.place] if given else state(leaf.name)
        if given and parts:
            raise Unanswered(f"are those of input {leaf.name!r}, of which each process has a part (dataset_strategy)")
        if tensor.is_meta:
            raise Unanswered(f"are those of {leaf.role} {leaf.name!r}, which is on the meta device and has none")
        whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        return whole

    return value
