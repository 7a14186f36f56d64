"""Cuts a code where ranks meet, into stretches that simulated ranks run one after another.

A rank runs a stretch without data from the others, and to its end before the next rank begins. Its intermediate values
are free by then, and the next rank reuses their memory: first use of new memory costs many times the arithmetic on it,
and ranks side by side would need new memory for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .instructions import CallOperator, Code, ConvertLayout, Instruction


@dataclass(frozen=True)
class Stretch:
    """Instructions that a rank runs in order; in a conversion it only hands in its parts.

    frees    the slots of inputs and of earlier stretches that they read for the last time
    keeps    those that they read, and that later stretches or outputs read too
    gives    the slots computed here that are read later
    """

    steps: tuple[Instruction, ...]
    frees: tuple[int, ...]
    keeps: tuple[int, ...]
    gives: tuple[int, ...]

    @cached_property
    def meetings(self) -> tuple[ConvertLayout, ...]:
        """The conversions for which ranks meet, whose results are available after the last rank has run."""
        return tuple(step for step in self.steps if isinstance(step, ConvertLayout) and step.communicates)

    @cached_property
    def common(self) -> tuple[int, ...]:
        """The slots that one rank computes for all: random numbers, hooks, and calls without operands."""
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

    A new stretch begins where the result of a conversion of the last one is read: program order determines the
    lifetimes of values and the order of random numbers. Only instructions that lead to no further conversion, such as
    those on reduced gradients, wait for the next stretch without starting it: in data parallelism, where all
    instructions after a reduction are of that kind, the whole backward is one stretch.
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
    """The slots of conversions for which ranks meet, and of all values that they depend on."""
    leading: set[int] = set()
    for step in reversed(code.instructions):
        if step.communicates or step.out in leading:
            leading.update((step.out, *step.operands))
    return leading


def _linked(cut: Sequence[Sequence[Instruction]], outputs: set[int]) -> tuple[Stretch, ...]:
    """Stretches from their instructions, with the slots that pass between them."""
    later, stretches = set(outputs), list[Stretch]()
    for steps in reversed(cut):
        inside = {step.out for step in steps}
        takes = dict.fromkeys(slot for step in steps for slot in step.operands if slot not in inside)
        frees, keeps = (tuple(slot for slot in takes if (slot in later) is kept) for kept in (False, True))
        gives = tuple(step.out for step in steps if step.out in later and not step.communicates)
        stretches.append(Stretch(tuple(steps), frees, keeps, gives))
        later |= set(takes)
    return tuple(reversed(stretches))
