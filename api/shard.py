"""`shard`: one engine behind three front doors — an eager function, an nn.Module, and a constraint inside a
function that is being sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from partway.annotate import (
    Request,
    by_argument,
    check_out_strategy,
    constraint_text,
    dataset_applies,
    dataset_was_set,
)
from partway.compile import Compiled, check_target, check_tensors, compile_call
from partway.context import ParallelContext, ParallelMode, current, current_algo
from partway.fusion.program import Program
from partway.guard import Guard
from partway.placing import Change, Placing, placing
from partway.propagation.capture import capturing
from partway.propagation.collectives import constrain
from partway.propagation.graph import Role
from partway.propagation.plan import Plan
from partway.propagation.structure import Call, check_call, flatten, flatten_call, name_of
from partway.runtime.step import CompiledStep, Waiting
from partway.strategy import Layout, Problem, RuntimeStateError, StrategyError, raise_problems


def shard(
    fn: Any = None,
    in_strategy: tuple[Any, ...] | Mapping[str, Any] | None = None,
    out_strategy: tuple[Any, ...] | None = None,
    *,
    parameter_plan: Mapping[str, Any] | None = None,
    mesh: Any = None,
    device: str | None = None,
    level: int = 0,
) -> Any:
    """Split a function or module over a mesh; everything that is not annotated is inferred.

    fn              an eager function (also as a decorator, with or without arguments) or an nn.Module, which is
                    changed in place and returned, as PyTorch's fully_shard does; its parameters keep their names
    in_strategy     one entry per argument by position, or a dict by argument name. An entry is a tuple with one
                    element per dim: split counts `(8, 1)`, axis names `("dp", None)`; or a list of placements, one
                    per axis; or None: the search decides
    out_strategy    likewise, one entry per output tensor; None: whole on every rank (tensors that are returned
                    beside a scalar loss stay as they lie)
    parameter_plan  a dict from fnmatch patterns on parameter names to strategies (modules only)
    mesh            a Mesh, a dict of axis sizes, or a DeviceMesh; None: the cheapest of those that the processes, or
                    `device_num` virtual devices, can form
    device          "cpu" or "cuda": where the tensors have to be, and whose profile prices the plan (unless the option
                    device_profile is set)
    level           what the search weighs most: 0 communication, 1 memory, 2 speed

    The first call with a new signature (shapes, dtypes, modes) captures and plans; later ones only run. When a
    launcher started this process it runs its own rank; otherwise all ranks are simulated in this process.

    Inside a function that is being sharded, `shard` only constrains the tensors it touches.

    Raises StrategyError for wrong arguments, here or at the call that shows their shapes. What failed has changed
    nothing: after a first call that was refused, `shard` takes the same module again with other annotations.
    """
    request = Request(in_strategy, out_strategy, parameter_plan, mesh, device, level)
    if fn is None:
        return functools.partial(_shard, request=request)
    return _shard(fn, request)


def _shard(fn: Any, request: Request) -> Any:
    before: _Engine | None = fn._engine if isinstance(fn, ShardedFunction) else getattr(fn, "_partway", None)
    if before is not None and not before.refused:
        raise StrategyError(f"{name_of(fn)} is sharded already; call shard once, with all annotations")
    check_target("shard", fn)
    if isinstance(fn, torch.nn.Module) and before is not None:
        fn.__dict__["_partway"] = _Engine(fn, request)
        return fn
    if isinstance(fn, torch.nn.Module):
        engine = _Engine(fn, request)
        if not _stands_alone(current()):
            placing().adopt(fn, current(), request.own_mesh)
        fn.__dict__["_partway"] = engine
        kind: Any = type(fn)
        fn.__class__ = _sharded_class(kind)
        return fn
    if request.parameter_plan:
        raise StrategyError("parameter_plan needs an nn.Module; annotate a function's arguments with in_strategy")
    return ShardedFunction(fn if before is None else before.fn, request)


class ShardedFunction:
    """A function that runs split. `plan` and `program` are those of its last call."""

    def __init__(self, fn: Callable[..., Any], request: Request) -> None:
        functools.update_wrapper(self, fn)
        self._engine = _Engine(fn, request)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.call(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise StrategyError(
            f"{name_of(self)} is a method; shard the module it belongs to, or a function of its tensors"
        )

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        return self._engine.latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return self._engine.latest().program


class ShardedModule:
    """What `shard` adds to the class of a module. `plan` and `program` are those of its last call."""

    _partway: _Engine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Put off the reduction of gradients: calls inside the block leave those of parameters unreduced, and the next
        backward of a call outside of it reduces their sum with its own, in the collectives of one step.

            with model.no_sync():
                for batch in batches[:-1]:
                    model(batch).backward()
            model(batches[-1]).backward()

        As with DistributedDataParallel, whose name this is, the call has to be inside, and `.grad` is right after the
        last backward only. Gradients that need no reduction come at once, as always.
        """
        waiting = [engine._waiting for engine in self._partway._engines()]
        before = [w.holding for w in waiting]
        for w in waiting:
            w.holding = True
        try:
            yield
        finally:
            for w, holding in zip(waiting, before, strict=True):
                w.holding = holding

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        return self._partway.latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return self._partway.latest().program


@functools.cache
def _sharded_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`cls` with a forward that runs split: same name, same signature, an instance of both."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._partway.call(args, kwargs, functools.partial(cls.forward, self))

    body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (ShardedModule, cls), body)


class _Engine:
    """Plans each signature of one function once, and runs it."""

    def __init__(self, fn: Callable[..., Any], request: Request) -> None:
        self.fn, self.request = fn, request
        self._runners: dict[Any, _Runner] = {}
        self._last: tuple[Guard, _Runner] | None = None
        self._waiting = Waiting()
        self._layouts: dict[str, Layout] = {}  # of the parameters, once a plan has split them
        self._capturing = False
        self._refused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Engine:
        """A copy of the module plans anew."""
        import copy

        return _Engine(copy.deepcopy(self.fn, memo), self.request)

    @property
    def refused(self) -> bool:
        """Whether every call so far was refused before there was a plan."""
        return self._refused and not self._runners

    def latest(self) -> Compiled:
        if self._last is None:
            raise RuntimeStateError(
                "there is no plan yet: it is made by the first call; partway.compile plans without running"
            )
        return self._last[1].compiled

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any] | None = None) -> Any:
        """Run one call: split, as a constraint (inside another capture), or plainly (stand_alone)."""
        original = plain or self.fn
        context = current()
        if self._capturing:
            return original(*args, **kwargs)
        if capturing():
            return self._constrained(original, args, kwargs)
        if _stands_alone(context):
            return original(*args, **kwargs)
        tensors = self._last[0].admits(args, kwargs, context) if self._last else None
        if tensors is None or self._last is None:
            try:
                runner = self._runner(args, kwargs, context)
            except Exception:
                for engine in self._engines():
                    engine._refused = True
                raise
            runner.bind(self.fn)
            self._last = Guard(self.fn, args, kwargs, context), runner
            tensors = flatten((args, kwargs))[0]
        return self._last[1](tensors)

    def _engines(self) -> Iterator[_Engine]:
        """This one, and those of the sharded modules inside."""
        yield self
        if isinstance(self.fn, torch.nn.Module):
            for module in self.fn.modules():
                if isinstance(module, ShardedModule):
                    yield module._partway

    def _runner(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> _Runner:
        """What runs a call; it is planned if it is the first of its signature."""
        call = flatten_call(self.fn, args, kwargs)
        check_call(self.fn, args, kwargs)
        check_tensors(call, self.request.device)
        key = self._signature(call, context)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = self._plan(call, context)
        return runner

    def _signature(self, call: Call, context: ParallelContext) -> tuple[Any, ...]:
        """All that a plan depends on. Parameters count by what may change: flags, dtypes and shapes."""
        tensors = tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in call.tensors)
        flags: tuple[Any, ...] = ()
        if isinstance(self.fn, torch.nn.Module):
            flags = (
                tuple(module.training for module in self.fn.modules()),
                tuple((p.requires_grad, p.dtype, tuple(p.shape)) for p in self.fn.parameters()),
            )
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return call.structure.key(), tensors, flags, autocast, context, current_algo()

    def _plan(self, call: Call, context: ParallelContext) -> _Runner:
        local = dataset_was_set(context) and dataset_applies(self.request, context)
        place = placing()
        args, kwargs = place.whole_call(call, context, local)
        self._capturing = True
        try:
            compiled = compile_call(
                self.fn, args, kwargs, self.request, context, current_algo(),
                processes=place.processes, fixed=self._layouts,
            )  # fmt: skip
        finally:
            self._capturing = False
        if isinstance(self.fn, torch.nn.Module):
            fresh = {name: found for name, found in compiled.plan.parameters.items() if name not in self._layouts}
            place.settle(self.fn, fresh)
            self._layouts.update(fresh)
        return _Runner(compiled, place, local, self._waiting)

    def _constrained(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a capture: mark the arguments and results that were annotated, and go on."""
        request = self.request
        name = name_of(self.fn)
        call = flatten_call(self.fn, args, kwargs)
        problems: list[Problem] = []
        by_name = by_argument(self.fn, request.in_strategy, call.arguments, problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        marked = [
            _mark(tensor, by_name.get(argument), request, f"argument {label!r} of {name}")
            for tensor, argument, label in zip(call.tensors, call.arguments, call.names, strict=True)
        ]
        args, kwargs = call.structure.build(marked)
        result = original(*args, **kwargs)
        if request.out_strategy is None:
            return result
        tensors, structure = flatten(result)
        check_out_strategy(request.out_strategy, len(tensors), problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        wanted = [*request.out_strategy, *[None] * (len(tensors) - len(request.out_strategy))]
        return structure.build(
            [
                _mark(t, s, request, f"output {i} of {name}")
                for i, (t, s) in enumerate(zip(tensors, wanted, strict=True))
            ]
        )


def _stands_alone(context: ParallelContext) -> bool:
    """Whether the user chose stand_alone: everything runs as if `shard` were not there."""
    return context.mode_was_set and context.parallel_mode == ParallelMode.STAND_ALONE


def _mark(tensor: Tensor, strategy: Any, request: Request, name: str) -> Tensor:
    if strategy is None:
        return tensor
    marked: Tensor = constrain(tensor, constraint_text(name, strategy, request.own_mesh, tensor.ndim), name)
    return marked


Source = Callable[[], Tensor]


class _Runner:
    """One planned signature: gathers the tensors of a call, runs the step, writes buffers, builds the result."""

    def __init__(self, compiled: Compiled, place: Placing, local: bool, waiting: Waiting) -> None:
        self.compiled, self._waiting = compiled, waiting
        graph = compiled.graph
        self._result = graph.result
        self._updated = {port.name for port in graph.outputs if port.role is Role.BUFFER_UPDATE}
        self._executor = place.executor(compiled.mesh)
        self._enter = [place.enter(placed, local) for placed in compiled.local.inputs]
        self._leave = [place.leave(placed) for placed in compiled.local.outputs]

    def bind(self, fn: Callable[..., Any]) -> None:
        """Take parameters and buffers from where they are in `fn` now: a module inside may have been replaced. The
        parameters that are what the executor takes stay until the next `bind`, and so does all that makes them so."""
        constants, local = self.compiled.graph.constants, self.compiled.local
        self._given: list[Any] = []
        self._changing: list[tuple[int, Source | None, Change | None, bool]] = []
        for i, (placed, enter) in enumerate(zip(local.inputs, self._enter, strict=True)):
            name, role = placed.port.name, placed.port.role
            source = _source(fn, constants, role, name)
            held = source() if source and role is Role.PARAMETER else None
            stays = held is not None and (enter is None or enter(held) is held)
            self._given.append(held if stays else None)
            if not stays:
                self._changing.append((i, source, enter, name in self._updated))
        self._buffers = [
            _source(fn, constants, Role.BUFFER, p.port.name) if p.port.role is Role.BUFFER_UPDATE else None
            for p in local.outputs
        ]

    @cached_property
    def _step(self) -> CompiledStep:
        return self._build(None)

    def _build(self, wanted: tuple[bool, ...] | None) -> CompiledStep:
        program = self.compiled.program if wanted is None else self.compiled.program_for(wanted)
        return CompiledStep(
            program.step, self._executor, self._build,
            self.compiled.accumulation_for, self._waiting, self.compiled.context.backend,
        )  # fmt: skip

    def __call__(self, given: Sequence[Tensor]) -> Any:
        rest = iter(given)
        tensors = self._given.copy()
        for i, source, enter, updated in self._changing:
            tensor = next(rest) if source is None else source()
            # a buffer that this call overwrites must stay as it was for the backward
            tensor = tensor.clone() if updated else tensor
            tensors[i] = enter(tensor) if enter else tensor
        results = []
        for value, leave, buffer in zip(self._step(tensors), self._leave, self._buffers, strict=True):
            if buffer is not None:
                with torch.no_grad():
                    buffer().copy_(value)
            else:
                results.append(leave(value) if leave else value)
        return self._result.build(results)


def _source(fn: Any, constants: Mapping[str, Tensor], role: Role, name: str) -> Source | None:
    """Where a tensor of a call comes from: a place in the module, a constant, or (None) the call itself."""
    if role is Role.INPUT:
        return None
    if role is Role.CONSTANT:
        constant = constants[name]
        return lambda: constant
    path, _, attribute = name.rpartition(".")
    module = fn.get_submodule(path)
    store = module._parameters if role is Role.PARAMETER else module._buffers
    return functools.partial(store.__getitem__, attribute)
