"""The runner of one planned signature: from the tensors of a call, through the program, to its result.

It binds parameters and buffers of the module, converts all tensors for the executor, and afterwards writes buffers and
inputs, repeats the function's side effects in Python, and builds the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partway.compiler.compiled import Compiled
from partway.compiler.planning_lock import planning
from partway.engine.placing import Change, Placing
from partway.propagation.capture.rewrites.overlap import MemoryRanges, shared
from partway.propagation.graph.graph import may_return
from partway.propagation.graph.port import Role
from partway.propagation.graph.structure import name_of, state_of
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.program import Program
from partway.propagation.torch_internals import buffers_in, parameters_in
from partway.reuse.courses import MistakenError
from partway.runtime.executors.waiting import Waiting
from partway.runtime.loaded import Loaded
from partway.runtime.random_state import Generators, put_back, states_of
from partway.strategy import RuntimeStateError

Source = Callable[[], Tensor]


class Runner:
    """Runs the calls of one course of one planned signature.

    compiled   the planned call
    state      the state on which it depends beside the call
    nodes      the number of nodes of its graphs: captured, local, forward and backward
    asked      the function's questions about values, with the answers that this course assumes
    own        the inputs of which each rank is given its part, with the parts
    """

    def __init__(self, fn: Any, compiled: Compiled, place: Placing, own: Mapping[str, Any], waiting: Waiting) -> None:
        self.compiled, self._waiting, self._name, self._place = compiled, waiting, name_of(fn), place
        self.state, self.own = compiled.state, own
        graph = compiled.graph
        self.nodes = len(graph.nodes) + (4 if graph.differentiable else 2) * len(compiled.local.lowered.graph.nodes)
        self.asked, self._counts = graph.asked, graph.counts
        self._assumed = tuple(bool(answer) for question, answer in graph.asked if question.late)
        self._has_effects = bool(self._assumed or compiled.effects.writes)
        self._result, self._effects = graph.result, graph.left
        updates = (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
        self._updated = {port.name for port in graph.outputs if port.role in updates}
        # tensors that this call overwrites are copied if the backward or a result needs the old values
        placeholders = compiled.local.lowered.graph.find_nodes(op="placeholder")
        self._copied = {
            placed.port.name
            for placed, node in zip(compiled.local.inputs, placeholders, strict=True)
            if placed.port.name in self._updated
            and (graph.differentiable or may_return(compiled.local.lowered.graph, node))
        }
        self._inputs = [port.name for port in graph.inputs if port.role is Role.INPUT]
        self._differentiable = next(
            (p.name for p in graph.outputs if p.role is Role.INPUT_UPDATE and p.requires_grad), None
        )
        self._executor = place.executor(compiled.mesh)
        self._observe = place.observer(fn, own, compiled)
        self._enter = [place.enter(placed, None) for placed in compiled.local.inputs]
        where = f"a call of {self._name}"
        self._leave = [place.leave(p, where if p.port.role is Role.RESULT else "") for p in compiled.local.outputs]
        self._loaded: Loaded | None = None
        self._memory = MemoryRanges()  # of state
        self._others: dict[tuple[bool, ...], Loaded] = {}  # by the outputs that they differentiate

    def bind(self, fn: Callable[..., Any], own: Mapping[str, Any]) -> None:
        """Look up parameters and buffers in `fn`, where a module may have been replaced. Parameters that the executor
        takes as they are stay bound until the next `bind`. `own`: the inputs of which each rank has its part, with
        the current parts."""
        constants, local, place = self.compiled.graph.constants, self.compiled.local, self._place
        taken: list[Any] = []
        changing: list[tuple[int, Source | None, Change | None, bool]] = []
        copies: list[tuple[str, Source]] = []
        for i, (placed, enter) in enumerate(zip(local.inputs, self._enter, strict=True)):
            name, role = placed.port.name, placed.port.role
            if role is Role.INPUT and name in own:
                enter = place.enter(placed, own[name])
            source = _source(fn, constants, role, name)
            if source and role in (Role.PARAMETER, Role.BUFFER):
                copies.append((name, source))
            held = source() if source and role is Role.PARAMETER else None
            is_taken = held is not None and (enter is None or enter(held) is held)
            taken.append(held if is_taken else None)
            if not is_taken:
                changing.append((i, source, enter, name in self._copied))
        buffers = [
            _source(fn, constants, Role.BUFFER, p.port.name) if p.port.role is Role.BUFFER_UPDATE else None
            for p in local.outputs
        ]
        written = [
            (self._inputs.index(p.port.name), functools.partial(place.write, p, own.get(p.port.name)))
            if p.port.role is Role.INPUT_UPDATE
            else None
            for p in local.outputs
        ]
        if self._updated:
            self._check_apart(fn)
        self._held = copies
        self.own, self._bound = own, (taken, changing, buffers, written)  # at once: another thread may be calling

    def _check_apart(self, fn: Callable[..., Any]) -> None:
        """Raise RuntimeStateError if a buffer that a call writes shares memory with other state."""
        state = state_of(fn)
        for one, other in shared(state.items()):
            if self._updated & {one, other} and state[one] is not state[other]:
                self._refuse(one, other)
        self._memory = MemoryRanges((name, tensor, name in self._updated) for name, tensor in state.items())

    def _check_inputs_apart(self, given: Sequence[Tensor]) -> None:
        """Raise RuntimeStateError if the call writes to one of two tensors that share memory, one of them an input."""
        memory = MemoryRanges(more=self._memory)
        for place, tensor in zip(self._inputs, given, strict=True):
            if (other := memory.take(place, tensor, place in self._updated)) is not None:
                self._refuse(other, place)

    def _refuse(self, one: str, other: str) -> None:
        raise RuntimeStateError(
            f"{self._name} writes in place to one of {one!r} and {other!r}, which share memory: a plan would not see "
            "the write in the other; give it a copy, with clone()"
        )

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether this can run a call with these changing numbers, the last of its tensors."""
        counts = self._counts
        return counts is None or counts.hold([int(tensor) for tensor in tensors[len(tensors) - counts.count :]])

    def load(self) -> Loaded:
        """The program, loaded once. (A cached_property would hold its lock while it waits for other threads.)"""
        with planning():
            self._loaded = self._loaded or self._loaded_as(self.compiled.program)
            return self._loaded

    def _separated(self, wanted: tuple[bool, ...]) -> Loaded:
        """The program whose backward starts from other outputs than planned."""
        if wanted not in self._others:
            purpose = f"differentiate other results of {self._name}"
            program = self._place.agreed(purpose, lambda: self.compiled.program_for(wanted), str)
            self._others[wanted] = self._loaded_as(program)
        return self._others[wanted]

    def _loaded_as(self, program: Program) -> Loaded:
        return Loaded(
            program,
            self._executor,
            self._separated,
            self._accumulation,
            self._waiting,
            self.compiled.context.backend,
            writes=not self._assumed,
            differentiate=self._differentiate,
        )

    def _differentiate(self, program: Program, wanted: tuple[bool, ...]) -> Program:
        purpose = f"differentiate the gradients of {self._name}"
        return self._place.agreed(purpose, lambda: self.compiled.differentiated_again(program, wanted), str)

    def _accumulation(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        purpose = f"put off the reductions of {self._name}"
        return self._place.agreed(purpose, lambda: self.compiled.accumulation_for(wanted), str)

    def __call__(self, given: Sequence[Tensor]) -> Any:
        """The result of a call with the tensors `given`. Raises MistakenError, before anything is written, if late
        questions have other answers than this course assumes."""
        if self._differentiable is not None and torch.is_grad_enabled():
            raise RuntimeStateError(
                f"the function writes to {self._differentiable!r} in place what depends on a tensor that needs a "
                "gradient, which would not reach it; return the new value, write a detached one, or call it under "
                "torch.no_grad()"
            )
        if self._updated:
            self._check_inputs_apart(given)
        if self._observe is not None:
            self._observe(given, [(name, source()) for name, source in self._held])
        rest = iter(given)
        bound, changing, buffers, written_inputs = self._bound
        tensors = bound.copy()
        for i, source, enter, copied in changing:
            tensor = next(rest) if source is None else source()
            tensor = tensor.clone() if copied else tensor
            tensors[i] = enter(tensor) if enter else tensor
        results: list[Any] = []
        writes: list[tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor]] = []
        loaded = self._loaded or self.load()
        before = states_of(tensors[0].device) if self._assumed and loaded.random else None
        for value, leave, buffer, written in zip(loaded(tensors), self._leave, buffers, written_inputs, strict=True):
            if written is not None:
                place, write = written
                writes.append((write, given[place], value))
            elif buffer is not None:
                writes.append((Tensor.copy_, buffer(), value))
            else:
                results.append(leave(value) if leave else value)
        result = self._result.build(results, given)  # removes the results that it uses from the front
        left: Sequence[Any] = ()
        if self._has_effects:
            assert self._effects is not None
            left, read = self._effects.build(results)
            if self._assumed:
                self._check_assumed(read, before)
        if writes:
            _write(writes)
        if left:
            self.compiled.effects.put(left)
        return result

    def _check_assumed(self, read: Sequence[Tensor], before: Generators | None) -> None:
        """Raise MistakenError unless late questions have the answers that this course assumes; random number generators
        are then reset to `before`."""
        answers = tuple(bool(tensor) for tensor in read)
        if answers != self._assumed:
            if before is not None:
                put_back(before, read[0].device)
            differing = next(i for i, pair in enumerate(zip(answers, self._assumed, strict=True)) if pair[0] != pair[1])
            raise MistakenError(answers[: differing + 1])


def _write(writes: Sequence[tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor]]) -> None:
    """Write values into buffers and inputs: all of them, even if an interrupt comes in between, so that all are of the
    same call."""
    with torch.no_grad():
        try:
            for write, place, value in writes:
                write(place, value)
        except BaseException:
            for write, place, value in writes:
                write(place, value)
            raise


def _source(fn: Any, constants: Mapping[str, Tensor], role: Role, name: str) -> Source | None:
    """A function that looks up a tensor in the module or among constants; None for a tensor of the call itself."""
    if role is Role.INPUT:
        return None
    if role is Role.CONSTANT:
        constant = constants[name]
        return lambda: constant
    path, _, attribute = name.rpartition(".")
    module = fn.get_submodule(path)
    store = parameters_in(module) if role is Role.PARAMETER else buffers_in(module)
    return functools.partial(store.__getitem__, attribute)
