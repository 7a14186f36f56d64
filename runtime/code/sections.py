"""A code cut where ranks meet: what simulated ranks run one after another, and what they then do together.

A stretch is what a rank runs without hearing from the others. Within one a rank runs to the end before the next rank
begins, so that what it computes on the way is gone by then: memory that is used for the first time costs many times the
arithmetic on it, and all ranks' at once would all be new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .instructions import CallOperator, Code, ConvertLayout, Instruction


@dataclass(frozen=True)
class Stretch:
    """Instructions that a rank runs in order, the conversions among them up to handing in the rank's parts.

    frees    the slots of inputs and of earlier stretches that they read, and nothing later
    keeps    those that something reads later, too
    gives    the slots computed here that are read later
    """

    steps: tuple[Instruction, ...]
    frees: tuple[int, ...]
    keeps: tuple[int, ...]
    gives: tuple[int, ...]

    @cached_property
    def meetings(self) -> tuple[ConvertLayout, ...]:
        """The conversions for which ranks meet, whose results are there when the last rank has run."""
        return tuple(step for step in self.steps if isinstance(step, ConvertLayout) and step.communicates)

    @cached_property
    def common(self) -> tuple[int, ...]:
        """The slots that one rank computes for all: random numbers, and what is made of no operands."""
        return tuple(step.out for step in self.steps if is_common(step))


def is_common(step: Instruction) -> bool:
    """Whether all ranks have one value, computed once."""
    return isinstance(step, CallOperator) and (step.once or not step.operands)


def stretches_of(code: Code) -> tuple[Stretch, ...]:
    """The stretches of `code`, in order; each instruction is in one."""
    level_of = levels(code)
    cut: list[list[Instruction]] = [[] for _ in range(max(level_of, default=-1) + 1)]
    for step, level in zip(code.instructions, level_of, strict=True):
        cut[level].append(step)
    return _linked(cut, {slot for slot in code.outputs if slot is not None})


def levels(code: Code) -> list[int]:
    """For each instruction the number of its stretch.

    A new stretch begins where the result of a conversion of the last one is read: the program's order says how long
    values live, and random numbers are drawn in it. Only what leads to no further conversion, such as what is done
    with reduced gradients, waits for the next stretch without beginning it: in data parallelism, where all that
    follows a reduction is of that kind, the whole backward is one stretch.
    """
    leading = _leading(code)
    here, ready, numbers = 0, dict[int, int](), []
    for step in code.instructions:
        level = max((here, *(ready.get(slot, 0) for slot in step.operands)))
        if step.once or step.out in leading:
            here = level
        ready[step.out] = level + step.communicates
        numbers.append(level)
    return numbers


def _leading(code: Code) -> set[int]:
    """The slots of conversions for which ranks meet, and of all that they are made of."""
    leading: set[int] = set()
    for step in reversed(code.instructions):
        if step.communicates or step.out in leading:
            leading.update((step.out, *step.operands))
    return leading


def _linked(cut: Sequence[Sequence[Instruction]], outputs: set[int]) -> tuple[Stretch, ...]:
    """The instructions of each stretch with what stretches give each other."""
    later, stretches = set(outputs), list[Stretch]()
    for steps in reversed(cut):
        inside = {step.out for step in steps}
        takes = dict.fromkeys(slot for step in steps for slot in step.operands if slot not in inside)
        frees, keeps = (tuple(slot for slot in takes if (slot in later) is kept) for kept in (False, True))
        gives = tuple(step.out for step in steps if step.out in later and not step.communicates)
        stretches.append(Stretch(tuple(steps), frees, keeps, gives))
        later |= set(takes)
    return tuple(reversed(stretches))
