"""The values that a rank computes, operator by operator, with the lines of code that ask for them."""

from __future__ import annotations

import linecache
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partway.propagation import (
    TorchDispatchMode,
    schema_of,
    sequence_number,
    sequence_number_now,
    tree_flatten,
    tree_map,
)
from partway.propagation.graph import is_persons
from partway.propagation.ops import by_hand


@dataclass(frozen=True)
class Line:
    """A line of a person's code."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source text of the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}, in {self.function}: {self.text}"


NOWHERE = Line("", 0, "")


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that a rank computed.

    operator   its name, "argument x" for an argument
    line       where it was asked for; in a backward pass, the line of the operator that is differentiated
    backward   whether it is part of a backward pass
    inside     the number of the call of `partway.ops` that computes it, 0 for none
    operands   the records of its inputs
    value      a copy
    axes       the axes of a collective
    reduction  the reduction of a collective that reduces
    """

    operator: str
    line: Line
    backward: bool
    inside: int
    operands: tuple[int, ...]
    value: Tensor
    axes: tuple[str, ...] = ()
    reduction: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that it shares with its counterpart on another rank."""
        return self.operator, self.line.file, self.line.number, self.backward

    @property
    def collective(self) -> bool:
        """Whether it is the result of a collective."""
        return self.inside > 0 or self.operator in _COLLECTIVES


_COLLECTIVES = frozenset(str(operator) for operator in by_hand.COLLECTIVES)


_EXACT = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Exact(TorchDispatchMode):
    """Computes in float64 even if a program asks for another dtype, such as a loss in float32: else the values of the
    ranks would differ from those of one device by more than rounding."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        args, kwargs = tree_map(_exact_dtype if schema_of(operator).is_mutable else _exact, given)
        return tree_map(_exact, operator(*args, **(kwargs or {})))


def _exact(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _EXACT:
        return value.to(_EXACT[value.dtype])
    return _exact_dtype(value)


def _exact_dtype(value: Any) -> Any:
    return _EXACT.get(value, value) if isinstance(value, torch.dtype) else value


class Recorder(Exact):
    """Records the values that the current thread computes. `collective(operator, arguments)` runs a collective.

    `drawn` has the lines that draw random numbers.
    """

    def __init__(self, collective: Callable[[Any, Sequence[Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[TensorRecord] = []
        self.drawn: list[Line] = []
        self._collective = collective
        self._places: dict[tuple[Any, ...], int] = {}
        self._kept: list[Tensor] = []  # so that no memory is reused
        self._lines = _Lines()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in the block."""
        with self._lines, self:
            yield

    def given(self, name: str, tensor: Tensor) -> None:
        """Record an argument."""
        self._note(TensorRecord(f"argument {name}", NOWHERE, False, 0, (), tensor.detach().clone()), tensor)

    def number_of(self, tensor: Tensor) -> int | None:
        """The record of a tensor."""
        return self._places.get(_place(tensor))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = tuple(
            number for tensor in tensors_in((args, kwargs)) if (number := self.number_of(tensor)) is not None
        )
        meets, line, backward, inside = operator in by_hand.COLLECTIVES, *self._lines.here()
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in operator.tags else None
        result = (
            self._collective(operator, args) if meets else super().__torch_dispatch__(operator, types, args, kwargs)
        )
        axes, reduction = (axes_of(operator, args), _reduction(operator, args)) if meets else ((), "")
        if state is not None and (kwargs.get("generator") or not torch.equal(state, torch.get_rng_state())):
            self.drawn.append(line)
        for tensor in tensors_in(result):
            value = tensor.detach().clone()
            self._note(TensorRecord(str(operator), line, backward, inside, operands, value, axes, reduction), tensor)
        return result

    def _note(self, record: TensorRecord, tensor: Tensor) -> None:
        self._places[_place(tensor)] = len(self.records)
        self.records.append(record)
        self._kept.append(tensor)


def axes_of(operator: Any, args: Sequence[Any]) -> tuple[str, ...]:
    """The axes of a collective."""
    names = [argument.name for argument in schema_of(operator).arguments]
    return tuple(args[names.index("axes")])


def _reduction(operator: Any, args: Sequence[Any]) -> str:
    return str(args[1]) if operator in (by_hand.all_reduce, by_hand.reduce_scatter) else ""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The memory and layout of a tensor: autograd returns the tensors that it saves as other objects."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Lines(TorchFunctionMode):
    """The lines of a person's code that ask for operators. Those of a backward pass are found by the number that
    autograd gives each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[int] = []
        self._forward: list[Line] = []
        self._calls = 0
        self._last_call: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None:
            number = sequence_number(result.grad_fn)
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
                self._forward.append(_line()[0])
        return result

    def here(self) -> tuple[Line, bool, int]:
        """The line that asks for the current operator, whether that is part of a backward pass, and the number of the
        surrounding call of `partway.ops`."""
        line, call = _line()
        number = sequence_number_now()
        if number is not None:
            at = bisect_left(self._numbers, number)
            return (self._forward[at] if at < len(self._forward) else line), True, 0
        if call is None:
            return line, False, 0
        if call is not self._last_call:
            self._last_call, self._calls = call, self._calls + 1
        return line, False, self._calls


def _line() -> tuple[Line, Any]:
    """The innermost line of a person's code, and the frame of `partway.ops` that it called, if any."""
    frame: FrameType | None = sys._getframe(1)
    call = None
    while frame is not None:
        name = frame.f_code.co_filename
        if is_persons(name):
            return Line(name, frame.f_lineno, frame.f_code.co_name), call
        if frame.f_globals.get("__name__", "").startswith("partway.ops"):
            call = frame
        frame = frame.f_back
    return NOWHERE, call
