"""The courses of one function for one signature: its questions about values, and the plan for each set of answers.

A function without questions has one plan, and its calls do not use this module. Otherwise the questions
(propagation/capture/export/questions.py) are answered for every call, in order and before anything runs, and the plan
with the same answers is used. The same answers lead to the same next question, so looking up a plan is a walk down a
tree. A late question is assumed to have the answer of the last call; if it has another, the call runs again.

The state that a function reads beside its arguments (state.py) may change as well: each state has its own courses.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from partway.propagation.capture.export.questions import Unanswered
from partway.propagation.graph.port import Role
from partway.propagation.graph.question import Answer, Leaf, Question, Values
from partway.propagation.graph.structure import name_of
from partway.requests.dtensors import whole
from partway.reuse.state import State

MOST_PLANS = 128  # of one function
MOST_NODES = 1_000_000  # of their graphs, about 3.5 GB: a large model has fewer plans
_OFTEN = 4  # changes of one value, after which a warning names it
_MANY = 8  # plans of one signature, after which a warning names the questions


class MistakenError(Exception):
    """A course assumed a wrong answer to a late question. `answers`: the right ones, up to the first that differs."""

    def __init__(self, answers: tuple[Answer, ...]) -> None:
        super().__init__()
        self.answers = answers


class Course(Protocol):
    """The runner of one course.

    state    the state on which it depends beside the call
    nodes    the number of nodes of its graphs, a measure of its memory
    """

    state: State
    nodes: int

    @property
    def asked(self) -> tuple[tuple[Question, Answer], ...]:
        """The questions of the course, with their answers."""
        ...

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call with these changing numbers among its tensors is of this course."""
        ...


C = TypeVar("C", bound=Course)
K = TypeVar("K", bound=Hashable)


class Courses(list[C]):
    """The runners of one signature, one for each course. `state`: the state on which they depend beside the call; unset
    while there are none."""

    state: State

    def of(self, values: Values, late: Sequence[Answer] = (), tensors: Sequence[Tensor] = ()) -> C | None:
        """The course with the answers of `values`; None if it is not planned (then random numbers are not advanced).
        `late` answers the first late questions; further ones are assumed to be as in the course called last."""
        answers: list[Answer] = []
        known = iter(late)
        draws = any(question.draws for course in self for question, _ in course.asked)
        before = torch.get_rng_state() if draws else None
        candidates = [course for course in self if course.serves(tensors)]
        while candidates:
            asked = candidates[0].asked
            if len(asked) == len(answers):
                return candidates[0]
            question, assumed = asked[len(answers)]
            answers.append(next(known, assumed) if question.late else question.answer(values))
            candidates = [course for course in candidates if _agrees(course, answers)]
        if before is not None:
            torch.set_rng_state(before)
        return None

    def called(self, course: C) -> None:
        """Note that `course` was called last."""
        self.sort(key=lambda each: each is not course)

    def add(self, course: C, name: str) -> None:
        """Add a course of the function `name`."""
        self.state = course.state.joined(self.state) if self else course.state
        self.insert(0, course)
        if len(self) == _MANY:
            lines = {question.line: None for each in self for question, _ in each.asked}
            warnings.warn(
                f"{name} was planned for the {_MANY}th time, because its course depends on values of tensors that "
                f"change from call to call:{''.join(lines)}\nEvery new course is planned again; do this part outside "
                "the sharded function if that takes too long",
                stacklevel=2,
            )


class PlannedCalls(Generic[K, C]):
    """The planned calls of one function, by signature and by the state that the function reads. At most MOST_PLANS are
    kept, with MOST_NODES in their graphs; the least recently called are dropped first, and the last one stays."""

    def __init__(self) -> None:
        self._by_signature: OrderedDict[K, list[Courses[C]]] = OrderedDict()
        self._changes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._by_signature)

    @property
    def signatures(self) -> tuple[K, ...]:
        """The signatures of all plans, the one called last at the end."""
        return tuple(self._by_signature)

    def find(self, fn: Callable[..., Any], key: K) -> Courses[C]:
        """The courses of the signature `key` for the current state of `fn`; empty if there are none."""
        known = self._by_signature.get(key)
        if not known:
            return Courses()
        for courses in known:
            if courses.state.holds():
                return courses
        for courses in known:
            if (state := courses.state.renewed(fn)) is not None:
                courses.state = state
                return courses
        before = known[-1].state
        self._note(name_of(fn), before.differences(State(fn, before.observers, before.kept, before.read)))
        return Courses()

    def keep(self, key: K, courses: Courses[C]) -> None:
        """Keep `courses`, which were called last, under the signature `key`."""
        known = self._by_signature.setdefault(key, [])
        self._by_signature.move_to_end(key)
        if not any(courses is one for one in known):
            known.append(courses)
        while self._are_too_many():
            oldest = next(iter(self._by_signature))
            self._by_signature[oldest].pop(0)
            if not self._by_signature[oldest]:
                del self._by_signature[oldest]

    def _are_too_many(self) -> bool:
        kept = [course for each in self._by_signature.values() for courses in each for course in courses]
        one = len(self._by_signature) == 1 and len(next(iter(self._by_signature.values()))) == 1
        return len(kept) > MOST_PLANS or (not one and sum(course.nodes for course in kept) > MOST_NODES)

    def _note(self, name: str, changed: Sequence[str]) -> None:
        self._changes.update(changed)
        for label in changed:
            if self._changes[label] == _OFTEN:
                warnings.warn(
                    f"{label} of {name} has changed {_OFTEN} times, and a call is planned again for each value, which "
                    "takes long; pass it as an argument that is a tensor, or keep it in a buffer",
                    stacklevel=6,
                )


def _agrees(course: Course, answers: list[Answer]) -> bool:
    return len(course.asked) >= len(answers) and course.asked[len(answers) - 1][1] == answers[-1]


def values_of(tensors: Sequence[Tensor], state: Callable[[str], Tensor], parts: Collection[str] = ()) -> Values:
    """A function that looks up the tensors of questions among a call's `tensors`, and by name in the `state` of its
    module. `parts`: the inputs of which a process has only its part."""

    def value(leaf: Leaf) -> Tensor:
        is_input = leaf.role is Role.INPUT
        tensor = tensors[leaf.place] if is_input else state(leaf.name)
        if is_input and leaf.name in parts:
            raise Unanswered(f"are those of input {leaf.name!r}, and each process has a part of it (dataset_strategy)")
        if tensor.is_meta:
            raise Unanswered(f"are those of {leaf.role} {leaf.name!r}, which is on the meta device and has none")
        return whole(tensor)

    return value
