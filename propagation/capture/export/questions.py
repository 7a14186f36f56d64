"""Questions about the values of tensors, which decide the course of a function.

    if mask.any(): ...            assert (ids < vocabulary).all()            for _ in range(int(lengths.max())): ...

A graph has one course. torch.export refuses a function that asks, so it is captured again with its questions answered
as in eager PyTorch: from the real values of the call. All operators that run before a question are recorded, and those
that it depends on run on the tensors of the call. Questions and answers are kept with the graph, and every later call
asks them again: another answer is another course, with its own plan (partway/reuse/courses.py).

A bool that depends on a matrix product or a convolution would cost as much as the network before it, on every call and
on whole tensors. It is answered late: a capture assumes an answer (one on which the function does not raise, if there
is one), and the condition becomes an output of the graph. It is read after a call has run, before any result is kept;
if the assumption was wrong, the call runs again on the other course. Numbers that depend on a product stay unanswered,
as do questions about values that are not available.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributions import Distribution
from torch.fx.node import map_arg

from ....strategy.errors import CaptureError
from ...graph.question import Answer, Leaf, Operation, Question, Slot, Values
from ...torch_internals import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    schema_of,
    storage_key,
    tree_flatten,
    tree_map,
    was_told_to_validate,
    without_modes,
)

aten = torch.ops.aten


class Answerable(IntEnum):
    """Which questions are answered: no more than a capture needs, since each costs a comparison on every call."""

    NOTHING = 0
    CONDITIONS = 1
    NUMBERS = 2


class Unanswered(Exception):
    """A question has no answer. The text says why, as the end of a sentence about values."""


class _Behind(Unanswered):
    """The question depends on a matrix product or a convolution."""


_DISTRIBUTIONS = os.path.join(os.path.dirname(torch.__file__), "distributions", "")
_CONDITIONS = frozenset({aten.equal.default, aten.allclose.default, aten.is_nonzero.default})
_NUMBER = aten._local_scalar_dense.default
ASKING = _CONDITIONS | {_NUMBER, aten.item.default}
_PRODUCTS = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "linear", "matmul",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable",
        "mkldnn_rnn_layer", "_cudnn_rnn",
    }
)  # fmt: skip


class Answering(TorchDispatchMode):
    """Answers the questions of a function from `values` while it is captured. `late` answers the first late questions;
    further ones are assumed to be False.

    asked        the questions, with their answers
    read         the conditions of the late questions; `assumed`: their answers
    unanswered   why a question had no answer
    drew         whether answers advanced the random generator

    It sees the calls below autograd, and so the questions inside composite operators.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo, which torch.cond calls, compile below this mode; otherwise it never compiles that code again."""
        return True

    def __init__(
        self, level: Answerable, values: Values, may_draw: bool, line: Callable[[], str], late: Sequence[Answer] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumed: list[Answer] = []
        self.read: list[Tensor] = []
        self._late = late
        self.asked: list[tuple[Question, Answer]] = []
        self.unanswered: str | None = None
        self.drew = False
        self._drawn: set[int] = set()  # the memory of the random numbers that answers depend on
        self.level, self._values, self._may_draw, self._line = level, values, may_draw, line
        self._tape: list[tuple[Any, Any, Any, Any]] = []
        self._known: dict[int, tuple[Leaf, Tensor]] = {}

    def of(self, leaves: Iterable[tuple[Leaf, Tensor]]) -> Answering:
        """This mode, for a run on the tensors of `leaves`."""
        self._known = {id(tensor): (leaf, tensor) for leaf, tensor in leaves}
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"a function whose course depends on values may not have a {getattr(func, '__name__', func)} as well: "
                "write this one as a branch or a loop of Python, or do the other outside the sharded function"
            )
        if self._is_asked(func, args):
            try:
                return self._answered(func, args, kwargs)
            except Unanswered as why:
                if _is_a_distributions_own_check():
                    return True
                self.unanswered = str(why)
        result = func(*args, **kwargs)
        self._tape.append((func, args, kwargs, result))
        return result

    def _is_asked(self, func: Any, args: tuple[Any, ...]) -> bool:
        if func in _CONDITIONS:
            return True
        if func is not _NUMBER:
            return False
        dtype = args[0].dtype
        return dtype is torch.bool or (
            self.level is Answerable.NUMBERS and not (dtype.is_floating_point or dtype.is_complex)
        )

    def _answered(self, func: Any, args: Any, kwargs: Any) -> Answer:
        try:
            question = self._question(func, args, kwargs)
        except _Behind:
            if _is_a_distributions_own_check() or (condition := _condition(func, args)) is None:
                raise
            answer = self._late[len(self.assumed)] if len(self.assumed) < len(self._late) else False
            self.assumed.append(answer)
            self.read.append(condition)
            self.asked.append((Question((), (), False, self._line(), late=True), answer))
            return answer
        if question.draws and not self._may_draw:
            raise Unanswered('follow from random numbers, which random_numbers="torch" draws in an order of its own')
        self.drew |= question.draws
        with without_modes():
            answer = question.answer(self._values)
        self.asked.append((question, answer))
        return answer

    def _question(self, func: Any, args: Any, kwargs: Any) -> Question:
        """The question that `func` asks, with the recorded operators that it depends on: those that created or wrote
        memory that is read."""
        needed = set(map(_memory, _tensors((args, kwargs))))
        kept: list[tuple[Any, Any, Any, Any]] = [(func, args, kwargs, None)]
        for entry in reversed(self._tape):
            created = {_memory(t) for t in _tensors(entry[3])}
            if created & needed or any(_memory(t) in needed for t in _written(*entry[:3])):
                needed.update(map(_memory, _tensors(entry[1:3])))
                kept.append(entry)
        return self._sliced(kept[::-1])

    def _sliced(self, entries: list[tuple[Any, Any, Any, Any]]) -> Question:
        """The question made of these recorded operators, whose tensors become slots."""
        slots: dict[int, int] = {}
        leaves: list[tuple[Leaf, Tensor]] = []
        operations = []

        def slot(value: Any) -> Any:
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise Unanswered("follow from a number that is read from tensors")
            if not isinstance(value, FakeTensor):
                return value
            if id(value) not in slots:
                leaves.append(self._leaf(value))
                slots[id(value)] = len(slots)
            return Slot(slots[id(value)])

        for func, args, kwargs, result in entries:
            _check_operation(func)
            arguments = tree_map(slot, args), tree_map(slot, kwargs)
            places = [slots.setdefault(id(tensor), len(slots)) for tensor in _tensors(result)]
            if _draws(func) and any(tensor.device.type != "cpu" for tensor in _tensors(result)):
                raise Unanswered("follow from random numbers that a GPU draws")
            operations.append(Operation(func, *arguments, tuple(places)))
        written = {_memory(t) for entry in entries for t in _written(*entry[:3])}
        memories = [_memory(tensor) for _, tensor in leaves]
        if any(memories.count(memory) > 1 for memory in written):
            raise Unanswered("are written to through a view")
        used = tuple((leaf, slots[id(t)], _memory(t) in written) for leaf, t in leaves)
        draws = {_memory(t) for func, _, _, result in entries if _draws(func) for t in _tensors(result)}
        if draws & self._drawn:
            raise Unanswered("follow from random numbers that were asked before; draw others for each question")
        self._drawn |= draws
        return Question(used, tuple(operations), bool(draws), self._line())

    def is_drawn_from(self, graph: fx.Graph) -> bool:
        """Whether the results of the traced `graph` depend on random numbers that answers also depend on: in a call the
        graph would draw others."""
        needed: set[int] = set()
        for node in reversed(graph.nodes):
            memory = {_memory(t) for t in _tensors(node.meta.get("val"))}
            written = _written(node.target, *map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
            if node.op == "output" or memory & needed or any(_memory(t) in needed for t in written):
                needed.update(_memory(t) for operand in node.all_input_nodes for t in _tensors(operand.meta.get("val")))
        return not needed.isdisjoint(self._drawn)

    def _leaf(self, tensor: Tensor) -> tuple[Leaf, Tensor]:
        if id(tensor) not in self._known:
            raise Unanswered("are neither those of arguments nor of the module")
        return self._known[id(tensor)][0], tensor


def _condition(func: Any, args: Any) -> Tensor | None:
    """The operand of a condition, if it is a tensor of one bool. (Below the tracer, none can be computed.)"""
    return args[0] if func in (_NUMBER, aten.is_nonzero.default) and args[0].dtype is torch.bool else None


def _check_operation(func: OpOverload) -> None:
    """Raise Unanswered for an operator that is too expensive to run for a question."""
    if schema_of(func).name.removeprefix("aten::") in _PRODUCTS:
        raise _Behind(f"follow from a matrix product or a convolution ({func}), which every call would run twice")


def _is_a_distributions_own_check() -> bool:
    """Whether a distribution of torch.distributions validates itself although nobody passed `validate_args`: without an
    answer it goes unchecked, as under python -O."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            asking = frame.f_locals.get("self")
            return isinstance(asking, Distribution) and not was_told_to_validate(asking)
        frame = frame.f_back
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    """The fake tensors in a value."""
    return (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, FakeTensor))


def _memory(tensor: Tensor) -> int:
    """The key of a tensor's storage."""
    place: int = storage_key(tensor)
    return place


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of `func` writes to."""
    if not isinstance(func, OpOverload) or not schema_of(func).is_mutable:
        return
    for i, formal in enumerate(schema_of(func).arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(formal.name))


def _draws(func: OpOverload) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags
