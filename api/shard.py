"""`shard`: one engine behind three front doors — an eager function, an nn.Module, and a constraint inside a
function that is being sharded.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from operator import attrgetter
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from partway.annotations.constrain import constrained_arguments, constrained_results
from partway.annotations.statements import dataset_applies, dataset_was_set
from partway.attached import engine_of, set_engine
from partway.compile import Compiled, check_parameters, check_target, check_tensors, compile_call, settings_of
from partway.context import current, current_algo
from partway.dtensors import brought, inputs_on, parameters_on, placed_as
from partway.fusion.program import Program
from partway.materialize import Init, check_materialized, materialize
from partway.options.fields import ParallelMode
from partway.options.parallel import ParallelContext
from partway.placing import Change, Placing, placing
from partway.planning import begin_call, calls, planning
from partway.propagation.capture.capture import capturing, state_of
from partway.propagation.capture.hooks import rest_outside
from partway.propagation.capture.overlap import Memory, shared
from partway.propagation.capture.stand_ins import attributes_of
from partway.propagation.graph.port import Role
from partway.propagation.graph.question import Answer
from partway.propagation.graph.structure import Call, check_call, flatten, flatten_call, name_of
from partway.propagation.plan.plan import Plan
from partway.propagation.program.accumulate import Accumulation
from partway.request import Request
from partway.reuse.courses import Courses, MistakenError, PlannedCalls, values_of
from partway.reuse.facts import fact
from partway.reuse.guard import Guard, asked, modes, warn_of_modes
from partway.reuse.names import Asks
from partway.rule import rules, version
from partway.runtime.process import launched
from partway.runtime.step import CompiledStep, Generators, Waiting, generators, put_back
from partway.strategy import Layout, Problem, RuntimeStateError, StrategyError, raise_problems
from partway.strategy.afterwards import afterwards


def shard(
    fn: Any = None,
    in_strategy: tuple[Any, ...] | Mapping[str, Any] | None = None,
    out_strategy: tuple[Any, ...] | None = None,
    *,
    parameter_plan: Mapping[str, Any] | None = None,
    mesh: Any = None,
    device: str | None = None,
    level: int = 0,
    module_plan: Mapping[str, Any] | None = None,
    plan: Any = None,
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
    module_plan     a dict from fnmatch patterns on the paths of modules inside to what goes into them and comes out,
                    {"layers.*.attn": {"in_strategy": (("dp", None, "tp"),), "out_strategy": (...,)}} (modules only)
    plan            the path of a file that `plan.save` wrote, a Plan, or a tuple of them: the strategies of every
                    operator are taken from it, and nothing is searched. A call that none was made for is an error
                    that says what differs; other annotations must agree

    The first call with a new signature (shapes, dtypes, modes) captures and plans; later ones only run. When a
    launcher started this process it runs its own rank; otherwise all ranks are simulated in this process.

    Each result has memory of its own. Of results that on one device are views of one another (`return y, y[1:]`), or of
    an argument, a parameter, a buffer, a write to one is not seen in the others; write before they are returned.

    Inside a function that is being sharded, `shard` only constrains the tensors it touches: what goes into a function
    or module, or a method of one, and what comes out.

    Raises StrategyError for wrong arguments, here or at the call that shows their shapes. What failed has changed
    nothing: after a first call that was refused, `shard` takes the same module again with other annotations.
    """
    request = Request(in_strategy, out_strategy, parameter_plan, mesh, device, level, module_plan, plan)
    if fn is None:
        return functools.partial(_shard, request=request)
    return _shard(fn, request)


def _shard(fn: Any, request: Request) -> Any:
    before: _Engine | None = None
    if isinstance(fn, ShardedFunction | ShardedModule):
        before = fn._engine if isinstance(fn, ShardedFunction) else engine_of(fn)
    if before is not None and not before.refused:
        raise StrategyError(f"{name_of(fn)} is sharded already; call shard once, with all annotations")
    check_target("shard", fn)
    if isinstance(fn, torch.nn.Module) and before is not None:
        set_engine(fn, _Engine(fn, request, parameters_on(fn, before.brought, request.own_mesh)))
        return fn
    if isinstance(fn, torch.nn.Module):
        engine = _Engine(fn, request, parameters_on(fn, brought(fn), request.own_mesh))
        if not _stands_alone(current()):
            placing().adopt(fn, current(), request)
        set_engine(fn, engine)
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
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, args, kwargs)
        return self._engine.call(args, kwargs)

    def __reduce__(self) -> Any:
        """Functions are pickled by name, and so is one that `shard` decorated."""
        path: str = getattr(self, "__qualname__", "")  # that of the function
        found: Any = sys.modules.get(self.__module__)
        for name in path.split("."):
            found = getattr(found, name, None)
        return path if found is self else (ShardedFunction, (self._engine.fn, self._engine.request))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if capturing() or _stands_alone(current()):
            return ShardedFunction(MethodType(self._engine.fn, instance), self._engine.request)
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A module is pickled, and copied, with what was said of it; another plans anew."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        if args[:1] != (type(self),):
            raise RuntimeStateError(
                f"{type(self).__name__} is pickled and copied by a __reduce__ of its own, which knows no shard; "
                "keep its state_dict(), or copy it before shard"
            )
        return _remade, (make, engine_of(self).kind, *args[1:]), *rest

    def __copy__(self) -> Any:
        make, args, state, *_ = self.__reduce_ex__(4)
        copied = make(*args)
        copied.__dict__.update(state)
        set_engine(copied, engine_of(self).of(copied))
        return copied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Put off the reduction of gradients: calls inside the block leave those of parameters unreduced, and the next
        backward of a call outside of it reduces their sum with its own, in the collectives of one step.

            with model.no_sync():
                for batch in batches[:-1]:
                    model(batch).backward()
            model(batches[-1]).backward()

        As with DistributedDataParallel, whose name this is, the call has to be inside, and `.grad` is right after the
        last backward only: of what waits it is a zero. Gradients that need no reduction come at once, as always.

        What waits stays until it is reduced, after an exception too; who drops gradients (zero_grad, or `.grad = None`)
        drops what waits of them. A step of the optimizer before the last backward does not see what waits.
        """
        waiting, block = [engine._waiting for engine in engine_of(self)._engines()], object()

        def leave() -> None:
            for w in waiting:
                w.blocks.discard(block)

        with afterwards(leave):
            for w in waiting:
                w.blocks.add(block)
            yield

    def materialize(
        self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, init: Init | None = None
    ) -> None:
        """Give parameters and buffers of the meta device memory and values: on every rank its part, of the numbers that
        one device would have, whatever the layout. So a model can be larger than a device:

            with torch.device("meta"):
                model = Model()
            pw.shard(model, ...)
            model.materialize((x,))

        The call of `args` and `kwargs` is planned (not run), and says how parameters are split and on what device.
        Each module is initialised by `init(module)`, inner ones first as in Module.apply; by default by the model's
        `_init_weights` (transformers), else by its own `reset_parameters`. Random numbers follow torch.manual_seed as
        the option random_numbers says.

        Raises RuntimeStateError where no initialiser writes a tensor, and what the first call would raise.
        """
        engine_of(self).materialize(tuple(args), dict(kwargs or {}), init)

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        return engine_of(self).latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return engine_of(self).latest().program


@functools.cache
def _sharded_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`cls` with a forward that runs split: same name, same signature, an instance of both."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return engine_of(self).call(args, kwargs, functools.partial(cls.forward, self))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, args, kwargs)
        thread = get_ident()
        outer = calls.get(thread, 0)
        try:
            begin_call(thread, outer)  # here, since while another thread plans nn.Module.__call__ is a tracer's
            if self._forward_pre_hooks:
                rest_outside(self._forward_pre_hooks, not _stands_alone(current()))
            return cls.__call__(self, *args, **kwargs)
        finally:
            calls[thread] = outer

    kind: Any = type(cls)
    made = False

    class Kind(kind):  # type: ignore[misc]
        """What code sets of `type(self)` is set of the user's class, for all its instances."""

        def __setattr__(self, name: str, value: Any) -> None:
            if made:
                setattr(cls, name, value)
            else:  # by what makes classes
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            delattr(cls, name)

    body = {"forward": forward, "__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    sharded: type[torch.nn.Module] = Kind(cls.__name__, (ShardedModule, cls), body)
    made = True
    return sharded


def _remade(make: Callable[..., Any], kind: Any, *args: Any) -> Any:
    """An empty sharded module of the class `kind`, for its state to be put in."""
    module = make(kind, *args)
    module.__class__ = _sharded_class(kind)
    return module


@functools.partial(torch.compiler.disable, reason="a sharded call is planned and compiled by Partway")
def _uncompiled(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call inside what torch.compile compiles, which is not looked into."""
    return fn(*args, **kwargs)


_captured: ContextVar[_Engine | None] = ContextVar("captured", default=None)  # whose function is planned right now


class _Engine:
    """Plans each signature of one function once, and runs it."""

    def __init__(self, fn: Callable[..., Any], request: Request, brought: Mapping[str, Layout] | None = None) -> None:
        self.fn, self.request, self.brought = fn, request, frozenset(brought or ())
        self._planned: PlannedCalls[_Runner] = PlannedCalls()
        self._last: tuple[Guard, Courses[_Runner], _Runner] | None = None
        self._waiting = Waiting()
        # of the parameters, once a plan has split them, or as they were brought
        self._layouts: dict[str, Layout] = dict(brought or {})
        self._settled: set[str] = set()
        self._refused = False
        self._asks = Asks()  # of every plan so far: signatures have the answers

    def __deepcopy__(self, memo: dict[int, Any]) -> _Engine:
        """A copy of the module plans anew."""
        return self.of(copy.deepcopy(self.fn, memo))

    def __reduce__(self) -> Any:
        if launched():
            raise RuntimeStateError(
                f"{name_of(self.fn)} is not pickled as a whole, since each process has parts of it; keep its "
                "state_dict(), with torch.distributed.checkpoint"
            )
        return _Engine, (self.fn, self.request)

    def of(self, fn: Callable[..., Any]) -> _Engine:
        """A new one for `fn`, of which the same was said."""
        return _Engine(fn, self.request, {name: self._layouts[name] for name in self.brought})

    @property
    def kind(self) -> type:
        """The class of the module before it was sharded."""
        bases: tuple[type, ...] = type(self.fn).__bases__
        return bases[1]

    @property
    def refused(self) -> bool:
        """Whether every call so far was refused before there was a plan."""
        return self._refused and not self._planned

    def latest(self) -> Compiled:
        if self._last is None:
            raise RuntimeStateError(
                "there is no plan yet: it is made by the first call; partway.compile plans without running"
            )
        return self._last[2].compiled

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any] | None = None) -> Any:
        """Run one call: split, as a constraint (inside another capture), or plainly (stand_alone)."""
        original = plain or self.fn
        context = current()
        if _captured.get() is self:
            return original(*args, **kwargs)
        if capturing():
            return self._constrained(original, args, kwargs)
        if _stands_alone(context):
            return original(*args, **kwargs)
        thread = get_ident()
        outer = calls.get(thread, 0)
        try:
            begin_call(thread, outer)
            return self._split(args, kwargs, context)
        finally:
            calls[thread] = outer

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> Any:
        """Run a call split, with what ran the last one if it is like it."""
        last = self._last
        tensors = last[0].admits(args, kwargs, context) if last else None
        if tensors is None or last is None:
            return self._first(args, kwargs, context)
        guard, courses, runner = last
        if runner.asked:
            runner = self._course(courses, tensors) or self._new_course(
                courses, flatten_call(self.fn, args, kwargs), context
            )
            if runner is not last[2]:
                runner.bind(self.fn)
                self._last = guard, courses, runner
        return self._run(guard, courses, runner, tensors, args, kwargs, context)

    def _run(
        self, guard: Guard, courses: Courses[_Runner], runner: _Runner, tensors: Sequence[Tensor],
        args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext,
    ) -> Any:  # fmt: skip
        """Run a call; again, on another of its courses, where this one assumed what turns out to be not so."""
        while True:
            try:
                return runner(tensors)
            except MistakenError as mistake:
                answers = mistake.answers
            runner = self._course(courses, tensors, answers) or self._new_course(
                courses, flatten_call(self.fn, args, kwargs), context, answers
            )
            courses.called(runner)
            runner.bind(self.fn)
            self._last = guard, courses, runner

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> Any:
        """Run a call that is unlike the last one."""
        if isinstance(self.fn, torch.nn.Module) and not all(t.is_meta for t in flatten((args, kwargs))[0]):
            check_materialized(self.fn)
        try:
            courses, runner = self._runner(args, kwargs, context)
        except Exception:
            for engine in self._engines():
                engine._refused = True
            raise
        runner.bind(self.fn)
        guard = Guard(self.fn, args, kwargs, context, courses.state)
        self._last = guard, courses, runner
        return self._run(guard, courses, runner, flatten((args, kwargs))[0], args, kwargs, context)

    def materialize(self, args: tuple[Any, ...], kwargs: dict[str, Any], init: Init | None) -> None:
        """See `ShardedModule.materialize`."""
        assert isinstance(self.fn, torch.nn.Module)
        context, place = current(), placing()
        given = [tensor for tensor in flatten((args, kwargs))[0] if not tensor.is_meta]
        if not given:
            raise StrategyError(
                "materialize was given no tensor that lies on a device, so that it is not known where parameters "
                "should lie; give the arguments of a call, such as model.materialize((x,))"
            )
        if _stands_alone(context):
            raise StrategyError("materialize needs a plan, and in stand_alone mode there is none; set another mode")
        compiled = self._runner(args, kwargs, context)[1].compiled
        settings = replace(settings_of(compiled.inputs, compiled.mesh), rules=rules())
        tied = {other: name for other, name in compiled.graph.aliases.items() if name in self._layouts}
        layouts = self._layouts | {other: self._layouts[name] for other, name in tied.items()}
        materialize(self.fn, layouts, place, settings, given[0].device, context.random_numbers, init)
        self._last = None  # it holds what the tensors were

    def _engines(self) -> Iterator[_Engine]:
        """This one, and those of the sharded modules inside."""
        yield self
        if isinstance(self.fn, torch.nn.Module):
            for module in self.fn.modules():
                if isinstance(module, ShardedModule):
                    yield engine_of(module)

    def _runner(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext
    ) -> tuple[Courses[_Runner], _Runner]:
        """What runs a call, and all that run calls of its signature; it is planned if it is the first of its course."""
        call = flatten_call(self.fn, args, kwargs)
        check_call(self.fn, args, kwargs)
        warn_of_modes(name_of(self.fn))
        check_tensors(call, self.request.device)
        check_parameters(self.fn)
        with planning():
            key = self._signature(call, context)
            courses = self._planned.find(self.fn, key)
            runner = self._course(courses, call.tensors) or self._new_course(courses, call, context)
            if (asks := self._asks | courses.state.reached.asks) != self._asks:
                self._asks = asks
                key = self._signature(call, context)
            self._planned.keep(key, courses)
            return courses, runner

    def _course(
        self, courses: Courses[_Runner], tensors: Sequence[Tensor], late: Sequence[Answer] = ()
    ) -> _Runner | None:
        """What runs a call of `tensors`, or None if no call was answered like it."""
        return courses.of(values_of(tensors, lambda name: attrgetter(name)(self.fn)), late)

    def _new_course(
        self, courses: Courses[_Runner], call: Call, context: ParallelContext, late: Sequence[Answer] = ()
    ) -> _Runner:
        with planning():
            runner = self._plan(call, context, late)
            courses.add(runner, name_of(self.fn))
        if any(question.draws for question, _ in runner.asked):  # planning drew for nothing, as it always does
            self._course(courses, call.tensors)
        return runner

    def _signature(self, call: Call, context: ParallelContext) -> tuple[Any, ...]:
        """All that a plan depends on. Parameters count by what may change: flags, dtypes and shapes."""
        tensors = tuple(
            (tuple(t.shape), t.dtype, t.device, t.requires_grad, placed_as(t), fact(attributes_of(t)))
            for t in call.tensors
        )
        flags: tuple[Any, ...] = ()
        if isinstance(self.fn, torch.nn.Module):
            flags = (
                tuple(module.training for module in self.fn.modules()),
                tuple((type(p), p.requires_grad, p.dtype, tuple(p.shape)) for p in self.fn.parameters()),
            )
        answers = asked(self._asks, context).answers(call.tensors)
        return call.structure.key(), tensors, answers, flags, modes(), context, current_algo(), version()

    def _plan(self, call: Call, context: ParallelContext, late: Sequence[Answer]) -> _Runner:
        local = dataset_was_set(context) and dataset_applies(self.request, context)
        place = placing()
        meshes = [self.request.own_mesh, *(found.mesh for found in self._layouts.values())]
        placed = inputs_on(call, next((mesh for mesh in meshes if mesh is not None), None))
        args, kwargs = place.whole_call(self.fn, self.request, call, context, local)
        values = values_of(call.tensors, state_of(self.fn).__getitem__, local)
        before = _captured.get()
        with afterwards(lambda: _captured.set(before)):
            _captured.set(self)
            plan = functools.partial(
                compile_call, self.fn, args, kwargs, self.request, context, current_algo(),
                processes=place.processes, fixed=self._layouts, placed=placed, values=values, late=late,
            )  # fmt: skip
            compiled = place.planned(self.fn, call, local, plan)
        if isinstance(self.fn, torch.nn.Module):
            # not what functional_call gave for this call
            own = {name for name, held in state_of(self.fn).items() if isinstance(held, torch.nn.Parameter)}
            fresh = {name: found for name, found in compiled.plan.parameters.items() if name in own - self._settled}
            place.settle(self.fn, fresh)
            self._settled.update(fresh)
            self._layouts.update(fresh)
        return _Runner(self.fn, compiled, place, local, self._waiting)

    def _constrained(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a capture: mark the arguments and results that were annotated, and go on."""
        name, problems = name_of(self.fn), list[Problem]()
        args, kwargs = constrained_arguments(self.fn, name, self.request, args, kwargs, problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        result = constrained_results(name, self.request, original(*args, **kwargs), problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        return result


def _stands_alone(context: ParallelContext) -> bool:
    """Whether the user chose stand_alone: everything runs as if `shard` were not there."""
    return context.mode_was_set and context.parallel_mode == ParallelMode.STAND_ALONE


Source = Callable[[], Tensor]
_STEPPED = 4  # parameters that show whether an optimizer has stepped


class _Runner:
    """One planned signature: gathers the tensors of a call, runs the step, writes buffers, builds the result."""

    def __init__(self, fn: Any, compiled: Compiled, place: Placing, local: bool, waiting: Waiting) -> None:
        self.compiled, self._waiting, self._name, self._place = compiled, waiting, name_of(fn), place
        self.state = compiled.state
        graph = compiled.graph
        self.asked = graph.asked
        self._assumed = tuple(bool(answer) for question, answer in graph.asked if question.late)
        self._leaves = bool(self._assumed or compiled.effects.writes)
        self._result, self._left = graph.result, graph.left
        updates = (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
        self._updated = {port.name for port in graph.outputs if port.role in updates}
        places = self._inputs = [port.name for port in graph.inputs if port.role is Role.INPUT]
        self._written = [
            (places.index(p.port.name), functools.partial(place.write, p, local))
            if p.port.role is Role.INPUT_UPDATE
            else None
            for p in compiled.local.outputs
        ]
        self._learned = next((p.name for p in graph.outputs if p.role is Role.INPUT_UPDATE and p.requires_grad), None)
        self._executor = place.executor(compiled.mesh)
        self._see = place.given(fn, local, compiled)
        self._enter = [place.enter(placed, local) for placed in compiled.local.inputs]
        self._leave = [place.leave(placed) for placed in compiled.local.outputs]
        self._step: CompiledStep | None = None
        self._memory = Memory()  # of state
        self._others: dict[tuple[bool, ...], CompiledStep] = {}  # by the outputs that they differentiate

    def bind(self, fn: Callable[..., Any]) -> None:
        """Take parameters and buffers from where they are in `fn` now: a module inside may have been replaced. The
        parameters that are what the executor takes stay until the next `bind`, and so does all that makes them so."""
        constants, local = self.compiled.graph.constants, self.compiled.local
        given: list[Any] = []
        changing: list[tuple[int, Source | None, Change | None, bool]] = []
        learned: list[Source] = []
        for i, (placed, enter) in enumerate(zip(local.inputs, self._enter, strict=True)):
            name, role = placed.port.name, placed.port.role
            source = _source(fn, constants, role, name)
            held = source() if source and role is Role.PARAMETER else None
            if source and held is not None and held.requires_grad and not held.is_inference():
                learned.append(source)
            stays = held is not None and (enter is None or enter(held) is held)
            given.append(held if stays else None)
            if not stays:
                changing.append((i, source, enter, name in self._updated))
        buffers = [
            _source(fn, constants, Role.BUFFER, p.port.name) if p.port.role is Role.BUFFER_UPDATE else None
            for p in local.outputs
        ]
        if self._updated:
            self._check_apart(fn)
        self._stepped = learned[:: -(-len(learned) // _STEPPED) or 1]
        self._bound = given, changing, buffers  # at once: another thread may be in a call

    def _check_apart(self, fn: Callable[..., Any]) -> None:
        """Raise RuntimeStateError if a buffer that a call writes shares memory with other state."""
        state = state_of(fn)
        for one, other in shared(state.items()):
            if self._updated & {one, other} and state[one] is not state[other]:
                self._refuse(one, other)
        self._memory = Memory((name, tensor, name in self._updated) for name, tensor in state.items())

    def _check_inputs_apart(self, given: Sequence[Tensor]) -> None:
        """Raise RuntimeStateError if a tensor of the call and another one share memory, and the call writes to one."""
        memory = Memory(more=self._memory)
        for place, tensor in zip(self._inputs, given, strict=True):
            if (other := memory.take(place, tensor, place in self._updated)) is not None:
                self._refuse(other, place)

    def _refuse(self, one: str, other: str) -> None:
        raise RuntimeStateError(
            f"{self._name} writes in place to one of {one!r} and {other!r}, which share memory: a plan would not see "
            "the write in the other; give it a copy, with clone()"
        )

    def _load(self) -> CompiledStep:
        """The step, assembled by the first call. (A cached_property would hold its lock while it waits for others.)"""
        with planning():
            self._step = self._step or self._step_of(self.compiled.program)
            return self._step

    def _build(self, wanted: tuple[bool, ...]) -> CompiledStep:
        if wanted not in self._others:
            purpose = f"differentiate other results of {self._name}"
            program = self._place.same(purpose, lambda: self.compiled.program_for(wanted), str)
            self._others[wanted] = self._step_of(program)
        return self._others[wanted]

    def _step_of(self, program: Program) -> CompiledStep:
        return CompiledStep(
            program.step, self._executor, self._build,
            self._accumulation, self._waiting, self.compiled.context.backend,
        )  # fmt: skip

    def _accumulation(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        purpose = f"put off the reductions of {self._name}"
        return self._place.same(purpose, lambda: self.compiled.accumulation_for(wanted), str)

    def __call__(self, given: Sequence[Tensor]) -> Any:
        if self._learned is not None and torch.is_grad_enabled():
            raise RuntimeStateError(
                f"the function writes to {self._learned!r} in place what depends on a tensor that needs a gradient, "
                "which would not reach it; return the new value, write a detached one, or call it under torch.no_grad()"
            )
        if self._updated:
            self._check_inputs_apart(given)
        if self._see is not None:
            self._see(given, [source() for source in self._stepped])
        rest = iter(given)
        bound, changing, buffers = self._bound
        tensors = bound.copy()
        for i, source, enter, updated in changing:
            tensor = next(rest) if source is None else source()
            # a buffer or input that this call overwrites must stay as it was for the backward
            tensor = tensor.clone() if updated else tensor
            tensors[i] = enter(tensor) if enter else tensor
        results: list[Any] = []
        writes: list[tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor]] = []
        step = self._step or self._load()
        before = generators(tensors[0].device) if self._assumed and step.random else None
        for value, leave, buffer, written in zip(step(tensors), self._leave, buffers, self._written, strict=True):
            if written is not None:
                place, write = written
                writes.append((write, given[place], value))
            elif buffer is not None:
                writes.append((Tensor.copy_, buffer(), value))
            else:
                results.append(leave(value) if leave else value)
        result = self._result.build(results)  # takes what it needs from the front
        left: Sequence[Any] = ()
        if self._leaves:
            assert self._left is not None
            left, read = self._left.build(results)
            if self._assumed:
                self._check_assumed(read, before)
        if writes:
            _write(writes)
        if left:
            self.compiled.effects.put(left)
        return result

    def _check_assumed(self, read: Sequence[Tensor], before: Generators | None) -> None:
        """Raise MistakenError unless what was asked late has the answers that this course assumed; random numbers are
        then as they were `before`."""
        answers = tuple(bool(tensor) for tensor in read)
        if answers != self._assumed:
            if before is not None:
                put_back(before, read[0].device)
            differing = next(i for i, pair in enumerate(zip(answers, self._assumed, strict=True)) if pair[0] != pair[1])
            raise MistakenError(answers[: differing + 1])


def _write(writes: Sequence[tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor]]) -> None:
    """Write values into buffers and inputs: all of them, also where an interrupt comes in between, so that none is of
    another call than the rest."""
    with torch.no_grad():
        try:
            for write, place, value in writes:
                write(place, value)
        except BaseException:
            for write, place, value in writes:
                write(place, value)
            raise


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
