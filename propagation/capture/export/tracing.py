"""Traces a call of a function with torch.export, under the modes and preparations that it needs.

`Flat` is the traced module, from tensors to a tuple of tensors. While it runs, the modes see every function of PyTorch
that the caller's code calls (dispatch_modes.py, hooks.py, questions.py, data_sizes.py).
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from ....strategy.basics.blocks import meanwhile, under_way
from ....strategy.errors import CaptureError, PartwayError
from ....strategy.notation import counted
from ...graph.port import Role
from ...graph.question import Leaf
from ...graph.structure import Call, Structure, flatten, name_of, state_of
from ...torch_internals import compiled_when_run, data_dependent
from ..hooks import Hooks, ModuleHooks, Noted
from ..rewrites.decomposition import write_out
from ..rewrites.overlap import shared
from .autocast import standing_for, without_casts
from .data_sizes import Sized
from .dispatch_modes import OutsideTensors, Regions, StandIns, Traceable, WithoutGradients, attributes_of
from .failures import Undecided, is_raised_on_purpose, reason_of
from .numbers import numbers_as_tensors, tensors_read
from .preparation import (
    check_operators,
    check_static,
    check_writes,
    prepared,
    quiet,
    without_pythons_random_numbers,
)
from .questions import ASKING, Answerable, Answering
from .source_lines import callers_line, name_frames, with_source_lines

Dims = frozenset[tuple[int, int]]  # pairs of the place of a tensor among those of a call, and a dim


class EffectListener(Protocol):
    """Records the values that a function leaves behind in Python while it is captured."""

    def begin(self) -> None:
        """Start a run of the function."""

    def end(self) -> list[Any]:
        """End a run of the function, and return the values that it leaves."""
        ...

    def abort(self) -> None:
        """End a run of the function that raised an error."""

    def finish(self) -> None:
        """End a capture: restore the lists and dicts that torch.export replaced."""

    def noted(self) -> Noted:
        """A record of what Python holds now."""
        ...


class NoEffects:
    """An EffectListener that records nothing."""

    def begin(self) -> None:
        """Start a run of the function."""

    def end(self) -> list[Any]:
        """No values."""
        return []

    abort = restore = finish = begin

    def noted(self) -> Noted:
        """A record without changes."""
        return self

    left = end


@dataclass(frozen=True)
class Attempt:
    """One attempt to trace a call of `fn`.

    answering       answers questions about values; None: the function may ask none
    effects         records the values that the function leaves behind
    hooks           records the hooks that it meets
    checked         whether torch.distributions check their parameters
    gradients       whether gradients are enabled
    returns_given   whether tensors of the call that it returns in an object are no results
    changing        the dims that have symbols for sizes (symbols.py)
    dense           whether to trace with contiguous tensors, as the function does not ask for strides
    stands_for      the device for whose tensors those of the CPU stand in, if the call's are on the meta device and
                    autocast is on (autocast.py)
    """

    fn: Callable[..., Any]
    call: Call
    answering: Answering | None
    effects: EffectListener
    hooks: Hooks
    checked: bool
    gradients: bool
    returns_given: bool
    changing: Dims = frozenset()
    dense: bool = False
    stands_for: str | None = None

    @property
    def on_meta(self) -> bool:
        """Whether all tensors of the call and of the function are on the meta device, and traced as such."""
        given = self.call.tensors[: len(self.call.tensors) - self.call.numbers]
        tensors = [*given, *state_of(self.fn).values()]
        return self.stands_for is None and bool(tensors) and all(tensor.is_meta for tensor in tensors)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the call that are passed as tensors, after all others."""
        tensors = self.call.tensors
        return [int(tensor) for tensor in tensors[len(tensors) - self.call.numbers :]]


@dataclass(frozen=True)
class Traced:
    """A traced call.

    module      the functional program
    signature   its inputs and outputs; `constants`: the values of the constant inputs
    result      the structure of the function's result; `left`: of the values that it leaves behind
    read        the outside tensors whose values became numbers
    """

    module: fx.GraphModule
    signature: ExportGraphSignature
    constants: Mapping[str, Any]
    result: Structure
    left: Structure
    read: list[torch.Tensor]


def capturing() -> bool:
    """Whether a capture is under way: a nested `shard` is then a constraint."""
    return under_way().capturing


def trace(attempt: Attempt) -> Traced:
    """Trace a call.

    Raises CaptureError where torch.export cannot make one static graph, Undecided where that needs more answers,
    AutocastOnMeta where it needs a device, and any exception that the function itself raises because of an answer.
    """
    if attempt.on_meta:
        return without_casts(name_of(attempt.fn), lambda: _trace(attempt))
    with standing_for(attempt.stands_for):
        return _trace(attempt)


def _trace(attempt: Attempt) -> Traced:
    fn, answering = attempt.fn, attempt.answering
    structures: list[tuple[Structure, Structure]] = []
    outside = OutsideTensors()
    try:
        module, signature, constants, read = _exported(attempt, Flat(attempt, structures, outside))
    except PartwayError:
        raise
    except Exception as error:  # torch.export raises many types; the caller's code may raise any
        if answering is not None and answering.asked and is_raised_on_purpose(error):
            raise
        raise _failure(attempt, error) from error
    if outside.needing_gradients:
        raise CaptureError(
            f"{name_of(fn)} uses {counted(len(outside.needing_gradients), 'tensor')} from outside that a gradient "
            f"should reach ({', '.join(outside.needing_gradients)}); shard the module they belong to, or pass them as "
            "arguments"
        )
    name_frames(module, fn)
    return Traced(module, signature, constants, *structures[-1], read=outside.read + read)


def checked(traced: Traced, fn: Callable[..., Any]) -> Traced:
    """The trace with its numbers as tensors (in place). Raises CaptureError and Undecided as `trace` does."""
    numbers_as_tensors(traced.module)
    check_static(traced.module, fn)
    check_operators(traced.module, fn)
    return traced


def _exported(
    attempt: Attempt, flat: Flat
) -> tuple[fx.GraphModule, ExportGraphSignature, Mapping[str, Any], list[torch.Tensor]]:
    """The functional program of `flat`, with its signature and constants, and the outside tensors that it reads as
    numbers."""
    fn, answering = attempt.fn, attempt.answering
    with (
        without_pythons_random_numbers(fn),
        meanwhile(capturing=True),
        warnings.catch_warnings(),
        torch.inference_mode(torch.is_inference_mode_enabled() and not attempt.gradients),
        torch.set_grad_enabled(attempt.gradients),
    ):
        given = attempt.call.tensors
        example = tuple((t.clone() if t.is_inference() else t).detach().requires_grad_(t.requires_grad) for t in given)
        if attempt.stands_for:
            example = tuple(_on_cpu(t).requires_grad_(t.requires_grad) for t in example)
        example = (*example[: len(given) - attempt.call.numbers], *map(of_size, attempt.numbers))
        if attempt.dense:
            example = tuple(_dense(t).requires_grad_(t.requires_grad) for t in example)
        warnings.simplefilter("ignore")
        others = (t.device for t in example if not t.is_meta)
        with (
            ModuleHooks(attempt.hooks, attempt.effects.noted).of(fn),
            prepared(fn, next(others, torch.device("cpu") if attempt.stands_for else None), attempt.checked),
            quiet(),
            compiled_when_run(),
        ):
            program = torch.export.export(flat, example, dynamic_shapes=_symbolic(attempt), strict=False)
            check_writes(program.graph_module, fn)
            if answering is not None and answering.is_drawn_from(program.graph):
                raise CaptureError(
                    f"{name_of(fn)} computes with random numbers that decide its course, too; draw others for that"
                )
            read = tensors_read(program)
            return *write_out(_without_questions(program)), program.constants, read


def of_size(number: int) -> torch.Tensor:
    """An empty tensor whose size stands for a number: torch.export has symbols only for sizes."""
    return torch.empty(number, 0)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _symbolic(attempt: Attempt) -> Any:
    """The dims with symbols for sizes, as the `dynamic_shapes` of torch.export."""
    if not attempt.changing:
        return None
    places = range(len(attempt.call.tensors))
    return (tuple({dim: Dim.AUTO for place, dim in attempt.changing if place == here} for here in places),)


def _without_given(
    results: list[torch.Tensor], structure: Structure, given: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Structure]:
    """The results that are not tensors of the call. A cache that a function updates and returns belongs to the caller;
    its tensors are those that the call wrote to."""
    place_of = {id(tensor): place for place, tensor in enumerate(given)}
    inside = structure.in_given_objects()
    places = {i: place_of[id(t)] for i, t in enumerate(results) if next(inside) and id(t) in place_of}
    return [t for i, t in enumerate(results) if i not in places], structure.returning(places)


def _without_questions(program: ExportedProgram) -> ExportedProgram:
    """Drop the answered questions: nothing reads them, and they cannot be traced again."""
    for node in reversed(program.graph.nodes):
        if node.target in ASKING and not node.users:
            program.graph.erase_node(node)
    return program


def _failure(attempt: Attempt, error: Exception) -> Exception:
    """The exception to raise where tracing raised `error`."""
    fn, call = attempt.fn, attempt.call
    inputs = zip((f"input {name}" for name in call.names), call.tensors, strict=True)
    if "expected compiled_fn to be GraphModule" in str(error) and (
        pair := next(shared([*inputs, *state_of(fn).items()]), None)
    ):  # torch.export's failure for a write to memory that two inputs share
        return CaptureError(
            f"{name_of(fn)} writes in place to one of {pair[0]} and {pair[1]}, which share memory; give it a copy, "
            "with clone()"
        )
    reason = reason_of(fn, error, attempt.answering.unanswered if attempt.answering else None)
    return Undecided(reason) if isinstance(error, data_dependent) else CaptureError(reason)


class Flat(torch.nn.Module):
    """A function as a module from tensors to a tuple of tensors. Each run adds the structures of the result and of the
    values that the function leaves behind to `structures`."""

    def __init__(
        self, attempt: Attempt, structures: list[tuple[Structure, Structure]], outside: OutsideTensors
    ) -> None:
        super().__init__()
        fn, effects = with_source_lines(attempt.fn), attempt.effects
        self.fn = fn
        self.call, self.answering, self.hooks, self.outside = attempt.call, attempt.answering, attempt.hooks, outside
        self.returns_given = attempt.returns_given
        # bound methods: torch.export undoes changes that forward makes to attributes
        self.add, self.begin, self.end, self.abort = structures.append, effects.begin, effects.end, effects.abort
        self.stand_ins = StandIns(name_of(fn), lambda: callers_line(traceback.extract_stack(), fn))
        self.attributes = {name: attributes_of(tensor) for name, tensor in state_of(fn).items()}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the result, of the values that the function leaves behind, and of its late conditions."""
        count = len(tensors) - self.call.numbers
        numbers = [tensor.shape[0] for tensor in tensors[count:]]
        args, kwargs = self.call.structure.build(list(tensors[:count]), numbers=numbers)
        answering = contextlib.nullcontext() if self.answering is None else self.answering.of(self._leaves(tensors))
        asks_numbers = self.answering is not None and self.answering.level is Answerable.NUMBERS
        sized = Sized() if asks_numbers else contextlib.nullcontext()
        self._stand_in(tensors)
        self.begin()
        try:
            with (  # the last mode sees a call first
                self.outside,
                Regions(Flat.forward.__code__),
                WithoutGradients(),
                Traceable(),
                self.stand_ins,
                self.hooks,
                sized,
                answering,
            ):
                results, structure = flatten(self.fn(*args, **kwargs))
            late = [] if self.answering is None else self.answering.read
            if late and self.hooks.by_number:
                raise CaptureError(
                    f"{name_of(self.fn)} asks for values behind a matrix product or a convolution and has hooks, which "
                    "would run twice where it assumed another answer; remove one of them"
                )
            left, places = flatten((self.end(), late))
            self.stand_ins.check((*results, *left))
            structure = structure.returned_by(self.call.structure)
            if self.returns_given:
                results, structure = _without_given(results, structure, tensors)
        except BaseException:
            self.abort()
            raise
        self.add((structure, places))
        return (*results, *left)

    def _stand_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors` and the module's tensors stand in for the caller's, with their attributes."""
        self.stand_ins.begin()
        for name, tensor, original in zip(self.call.names, tensors, self.call.tensors, strict=True):
            self.stand_ins.stand(f"input {name}", tensor, attributes_of(original))
        for name, tensor in state_of(self.fn).items():
            self.stand_ins.stand(name, tensor, self.attributes[name])

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """The stand-ins for the tensors of the call and the module, with their roles and names."""
        for place, (name, tensor) in enumerate(zip(self.call.names, tensors, strict=True)):
            yield Leaf(Role.INPUT, name, place), tensor
        for name, tensor in state_of(self.fn).items():
            yield Leaf(Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER, name), tensor
