"""A graph at run time: a list of instructions, each of which computes one slot from others. An instruction calls an
operator, converts a layout, or tells the rank's position.

Both executors run the same instructions, and in both a value is one rank's tensor. Only the movement of data between
ranks differs, so an executor writes each instruction as a Python expression. The value of an instruction may be
`awaited`, that is, available only later: of a collective, or of a local operation such as a copy to the host.

    assemble.py    from a graph to instructions
    memory.py      finds those that may write into existing memory
    straight_line.py   from instructions to a Python function
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ...propagation.cost.cost import Hierarchy
from ...propagation.ops.collectives import payload_bytes
from ...propagation.program.collective import Conversion
from ...strategy.cut import SliceWindow
from ...strategy.placement import Kind, Placement, Shard


@dataclass(frozen=True, slots=True)
class Relayout:
    """A conversion as an instruction: of one or several tensors, along `axes`.

    owned     for each tensor, whether nothing else reads its memory, so that it may hold the result
    private   for each tensor, whether each simulated rank has its own memory, see `CallOperator`
    loose     whether the result may have any strides
    hierarchy    its steps if it is large, if it then has several
    """

    kind: Kind
    source: Placement
    target: Placement
    axes: tuple[str, ...]
    size: int
    phase: str
    tags: tuple[int, ...]
    grouped: bool
    owned: tuple[bool, ...]
    private: tuple[bool, ...]
    loose: bool = False
    hierarchy: Hierarchy | None = None

    def payload(self, shape: Sequence[int], itemsize: int) -> int:
        """The payload of a local tensor of `shape`: see `Collective.payload_bytes`."""
        return payload_bytes(self.source, self.target, shape, itemsize, self.size)

    @property
    def window(self) -> SliceWindow | None:
        """The window that an exchange assembles from slices, or adds back to slices."""
        return next((side for side in (self.source, self.target) if isinstance(side, SliceWindow)), None)

    @property
    def dims(self) -> tuple[int, int]:
        """The dims that are joined and cut (0 where a side is whole)."""
        before = self.source.dim if isinstance(self.source, Shard) else 0
        after = self.target.dim if isinstance(self.target, Shard) else 0
        return before, after


@dataclass(frozen=True, slots=True)
class CallOperator:
    """Compute slot `out` from the slots `operands`, each named once.

    text         the call as Python, in which v3 is slot 3 and other names are constants of the Code
    in_place     the same call, writing into the memory of an operand that nothing else reads; "" if there is none
    private      each simulated rank has its own of that memory (ranks share values that are the same for several)
    once         it draws random numbers, which must be the same on every rank, or calls a user's hook
    follows      its value has the traced strides if its operands have theirs
    awaited      it only starts an operation, and returns an object whose `wait` returns the value
    """

    out: int
    operands: tuple[int, ...]
    name: str
    text: str
    in_place: str = ""
    private: bool = False
    once: bool = False
    follows: bool = False
    awaited: bool = False
    communicates: ClassVar[bool] = False

    def expression(self, *, in_place: bool, late: bool) -> str:
        """The value as a Python expression, in the memory of an operand if possible and `in_place`. An awaited call
        gives the object to wait for if `late`, else the value."""
        text = (in_place and self.in_place) or self.text
        return f"{text}.wait()" if self.awaited and not late else text


@dataclass(frozen=True, slots=True)
class ConvertLayout:
    """Compute slot `out` by converting the slots `operands`, one for each tensor."""

    out: int
    operands: tuple[int, ...]
    name: str
    relayout: Relayout
    once: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    @property
    def communicates(self) -> bool:
        """Whether ranks send data, and so meet."""
        return self.relayout.kind.communicates

    awaited = communicates


@dataclass(frozen=True, slots=True)
class TellPosition:
    """Set slot `out` to the rank's position along `axes`."""

    out: int
    name: str
    axes: tuple[str, ...]
    operands: ClassVar[tuple[int, ...]] = ()
    once: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    awaited: ClassVar[bool] = False
    communicates: ClassVar[bool] = False


Instruction = CallOperator | ConvertLayout | TellPosition


@dataclass(frozen=True)
class Code:
    """A graph as instructions; inputs fill the first slots. `shared`: for each output, whether it may share memory with
    an input, with another output, or with something larger than itself. `traced`: fake tensors like the values of
    slots, for those with a traced tensor."""

    instructions: tuple[Instruction, ...]
    inputs: int
    outputs: tuple[int | None, ...]
    shared: tuple[bool, ...]
    constants: Mapping[str, Any]
    phase: str
    traced: Mapping[int, Tensor] = field(default_factory=dict)
    reasons: Sequence[Conversion] = ()  # the planned conversions, by tag
    unsized: frozenset[int] = frozenset()  # the slots whose sizes are known only at run time

    @cached_property
    def identity(self) -> int:
        """A checksum that distinguishes it from other codes, the same in every process."""
        text = "\n".join(
            f"{step.out} {step.operands} {step.text if isinstance(step, CallOperator) else ''} {step.name}"
            for step in self.instructions
        )
        return zlib.crc32(f"{self.phase}\n{text}\n{self.outputs}".encode())

    def describe(self, step: Instruction) -> str:
        """A description of `step`: "the backward's all_reduce of fc1.weight over dp (model.py:31, ...)"."""
        if not isinstance(step, ConvertLayout):
            return f"{step.name} of the {self.phase}"
        c = step.relayout
        reasons = [self.reasons[tag] for tag in c.tags if tag < len(self.reasons)]
        tensors = [reason.tensor for reason in reasons]
        named = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        line = next((f" ({reason.line})" for reason in reasons if reason.line), "")
        return f"the {self.phase}'s {c.kind} of {named or step.name} over {','.join(c.axes)}{line}"


@dataclass(frozen=True)
class InputsAs:
    """Properties of a program's inputs, by their places.

    loose      parts that may have any strides
    written    parts that the program may write into
    """

    loose: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()

    @cached_property
    def views(self) -> frozenset[int]:
        """The inputs whose parts are views: of the whole if possible, and always of the part that a rank holds."""
        return self.loose | self.written


AS_TRACED = InputsAs()


Mark = Callable[[Instruction, Any, bool], None]  # takes an instruction, its value, and whether it was waited for
