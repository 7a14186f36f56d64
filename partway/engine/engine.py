"""The engine behind a sharded function or module: plans each signature of it once, and runs its calls.

A call like the last one, by its guard (guard.py), only runs. Any other is looked up by its signature, the answers to
the function's questions about values and the state that it reads (courses.py); the first of its kind is planned.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import forward_ad

from partway.annotations.constrain import constrained_arguments, constrained_results
from partway.compiler.capture_call import CallInputs, in_inference
from partway.compiler.compiled import Compiled
from partway.compiler.driver import compile_call
from partway.compiler.passes import settings_of
from partway.compiler.planning_lock import begin_call, calls, planning
from partway.engine.materialize import Init, PartInitialiser, check_materialized, materialize
from partway.engine.placing import FirstCall, Placing, placing
from partway.engine.runner import Runner
from partway.options.context import current, current_algo
from partway.options.parallel import ParallelContext, ParallelMode
from partway.propagation.capture.export.dispatch_modes import attributes_of
from partway.propagation.graph.question import Answer
from partway.propagation.graph.structure import Call, check_call, flatten, flatten_call, name_of, state_of
from partway.propagation.plan.plan import Plan
from partway.propagation.torch_internals import forward_level, in_transform
from partway.requests.dtensors import inputs_on, placed_as
from partway.requests.request import ATTRIBUTE, Request, check_inference, check_tensors, engine_of
from partway.requests.user_rules import rules, version
from partway.reuse.changing import CallSizes, Numbers, Sizes
from partway.reuse.code_names import Asks
from partway.reuse.courses import Courses, MistakenError, PlannedCalls, values_of
from partway.reuse.guard import Guard, asked, modes, warn_of_modes
from partway.reuse.kinds import fact
from partway.reuse.replanning import Signature, note_replanning
from partway.runtime.executors.waiting import Waiting
from partway.runtime.launching.process import launched
from partway.strategy import CaptureError, Layout, Mesh, Problem, RuntimeStateError, StrategyError, raise_problems
from partway.strategy.basics.blocks import meanwhile, under_way
from partway.strategy.errors import DoesNotFitError

_log = logging.getLogger("partway")


class LastCall(NamedTuple):
    """The runner of the last call, and the guard that compares a call with it."""

    guard: Guard
    courses: Courses[Runner]
    runner: Runner


def attached_engine(module: Any) -> Engine:
    """The engine of a module known to be sharded; it is fast, because every call reads it."""
    engine: Engine = module.__dict__[ATTRIBUTE]
    return engine


class Engine:
    """Plans each signature of one function once, and runs it.

    fn             the function or module
    request        the arguments of `shard`
    own_dtensors   the names of the parameters that the user laid out, as DTensors
    waiting        the gradients with delayed reductions (no_sync)
    last           the runner of the last call, with its guard
    """

    def __init__(self, fn: Callable[..., Any], request: Request, layouts: Mapping[str, Layout] | None = None) -> None:
        """Make an engine without plans. `layouts`: those of the parameters that are DTensors."""
        self.fn, self.request, self.own_dtensors = fn, request, frozenset(layouts or ())
        self.waiting = Waiting()
        self.last: LastCall | None = None
        self._planned: PlannedCalls[Signature, Runner] = PlannedCalls()
        # the layouts of parameters that are DTensors or that a plan has laid out
        self._layouts: dict[str, Layout] = dict(layouts or {})
        self._settled: set[str] = set()
        self._left_alone: set[str] = set()  # parameters that no plan for training lays out, such as tied ones
        self._refused = False
        self._told_of_transforms = False
        self.searched = 0  # the number of plans made by a search and not from a plan for other sizes
        self._copies: WeakSet[Engine] = WeakSet()  # of copied modules, which are laid out with this one
        self._materialized: Compiled | None = None
        self._asks = Asks()  # of every plan so far; signatures contain the answers
        self._sizes = Sizes(request.sizes) if request.dynamic is not False else None
        self._numbers = Numbers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """The engine of a copy of the module, which makes its own plans."""
        return self.renewed(copy.deepcopy(self.fn, memo))

    def __reduce__(self) -> Any:
        if launched():
            raise RuntimeStateError(
                f"{name_of(self.fn)} is not pickled as a whole, since each process has parts of it; keep it "
                "with partway.save, or its state_dict()"
            )
        return Engine, (self.fn, self.request)

    def renewed(self, fn: Callable[..., Any]) -> Engine:
        """A new engine with the same request for `fn`, a copy. Its parameters have the layouts of the original's, also
        those of later plans, so that a moving average can follow them."""
        copied = Engine(fn, self.request, {name: self._layouts[name] for name in self.own_dtensors})
        copied._layouts, copied._settled = dict(self._layouts), set(self._settled)
        self._copies.add(copied)
        return copied

    @property
    def kind(self) -> type:
        """The class of the module before it was sharded."""
        bases: tuple[type, ...] = type(self.fn).__bases__
        return bases[1]

    @property
    def refused(self) -> bool:
        """Whether there were calls, and all were refused before a plan was made."""
        return self._refused and not self._planned

    def latest(self) -> Compiled:
        """The plan and programs of the last call, or of the call given to `materialize`. Raises RuntimeStateError
        before either."""
        compiled = self.last.runner.compiled if self.last else self._materialized
        if compiled is None:
            raise RuntimeStateError(
                "there is no plan yet: it is made by the first call; partway.compile plans without running"
            )
        return compiled

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any] | None = None) -> Any:
        """Run one call: sharded, as a constraint (inside another capture), or plainly (stand_alone)."""
        original = plain or self.fn
        context, outside = current(), under_way()
        if outside.planned is self:
            return original(*args, **kwargs)
        if outside.manual is not None:
            raise StrategyError(
                f"{name_of(self.fn)} is sharded and is called inside of a manual function, which is the program of "
                f"one rank; "
                "call what was sharded outside of it"
            )
        if outside.capturing:
            return self._constrained(original, args, kwargs)
        if is_transformed_call(self.fn, args, kwargs):
            return self._whole(original, args, kwargs)
        last = self.last
        if (last is None or context is not last.guard.context) and stands_alone(context):
            return original(*args, **kwargs)
        thread = get_ident()
        outer = calls.get(thread, 0)
        try:
            begin_call(thread, outer)
            return self._split(args, kwargs, context)
        finally:
            calls[thread] = outer

    def _whole(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call inside a transform without sharding, on whole parameters: a plan cannot take the wrapped tensors
        of a transform."""
        if not self._told_of_transforms:
            self._told_of_transforms = True
            name = name_of(self.fn)
            _log.warning("%s is transformed (torch.func, forward_ad): these calls run whole, not split", name)
        if not launched() or not isinstance(self.fn, torch.nn.Module):
            return original(*args, **kwargs)
        from partway.runtime.tensors.transformed import whole_parameters

        with whole_parameters(self.fn):
            return original(*args, **kwargs)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> Any:
        """Run a sharded call, reusing the last runner if its guard holds."""
        last = self.last
        tensors = last.guard.admits(args, kwargs, context) if last else None
        if last is not None and last.runner.own and placing(self._mesh).any_rank(tensors is None, self.fn):
            tensors = None  # the part of another rank has a new shape
        if tensors is None or last is None:
            return self._first(args, kwargs, context)
        guard, courses, runner = last
        if runner.asked or not runner.serves(tensors):
            known = self._course(courses, tensors)
            if known is None and guard.numbers:
                return self._first(args, kwargs, context)
            runner = known or self._new_course(courses, self._wholes(args, kwargs, context), context)
            if runner is not last.runner:
                runner.bind(self.fn, last.runner.own)
                self.last = LastCall(guard, courses, runner)
        return self._run(guard, courses, runner, tensors, args, kwargs, context)

    def _run(
        self,
        guard: Guard,
        courses: Courses[Runner],
        runner: Runner,
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ParallelContext,
    ) -> Any:
        """Run a call, and run it again on another course whenever this one assumed wrong answers."""
        while True:
            try:
                return runner(tensors)
            except MistakenError as mistake:
                answers, own = mistake.answers, runner.own
            runner = self._course(courses, tensors, answers) or self._new_course(
                courses, self._wholes(args, kwargs, context), context, answers
            )
            courses.called(runner)
            runner.bind(self.fn, own)
            self.last = LastCall(guard, courses, runner)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> Any:
        """Run a call that differs from the last one."""
        if isinstance(self.fn, torch.nn.Module) and not all(t.is_meta for t in flatten((args, kwargs))[0]):
            check_materialized(self.fn)
        try:
            courses, runner, call = self._runner(args, kwargs, context)
        except Exception:
            for engine in self.engines():
                engine._refused = True
            raise
        runner.bind(self.fn, call.own)
        guard = Guard(self.fn, args, kwargs, context, courses.state, call.paths)
        self.last = LastCall(guard, courses, runner)
        return self._run(guard, courses, runner, call.tensors, args, kwargs, context)

    def materialize(self, args: tuple[Any, ...], kwargs: dict[str, Any], init: Init | None) -> None:
        """See `ShardedModule.materialize`."""
        assert isinstance(self.fn, torch.nn.Module)
        context, place = current(), placing(self._mesh)
        tensors = [tensor for tensor in flatten((args, kwargs))[0] if not tensor.is_meta]
        if not tensors:
            raise StrategyError(
                "materialize was given no tensor that lies on a device, so that it is not known where parameters "
                "should lie; give the arguments of a call, such as model.materialize((x,))"
            )
        if stands_alone(context):
            raise StrategyError("materialize needs a plan, and in stand_alone mode there is none; set another mode")
        compiled = self._runner(args, kwargs, context)[1].compiled
        settings = replace(settings_of(compiled.inputs, compiled.mesh), rules=rules())
        tied = {other: name for other, name in compiled.graph.aliases.items() if name in self._layouts}
        layouts = self._layouts | {other: self._layouts[name] for other, name in tied.items()}
        maker = PartInitialiser(layouts, place, settings, tensors[0].device, context.random_numbers)
        with torch.inference_mode(False):  # training may follow
            materialize(self.fn, maker, init)
        self.last = None  # it holds the old tensors
        self._materialized = compiled

    def planned_only(self, args: tuple[Any, ...]) -> Compiled:
        """Plan the call of `args` in inference without running it."""
        context = current()
        if stands_alone(context):
            raise StrategyError("there is no plan in stand_alone mode; set another mode")
        with torch.no_grad():
            compiled = self._runner(args, {}, context)[1].compiled
        self._materialized = compiled
        return compiled

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """See `ShardedModule.prepare`."""
        context = current()
        if stands_alone(context):
            raise StrategyError("there is nothing to prepare in stand_alone mode, which has no plan; set another mode")
        if isinstance(self.fn, torch.nn.Module):
            check_materialized(self.fn)
        _, runner, _ = self._runner(args, kwargs, context)
        runner.load()
        self._materialized = runner.compiled
        return runner.compiled.plan

    def engines(self) -> Iterator[Engine]:
        """This one, and those of the sharded modules inside it."""
        yield self
        if isinstance(self.fn, torch.nn.Module):
            for module in self.fn.modules():
                if engine_of(module) is not None:
                    yield attached_engine(module)

    def _runner(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext
    ) -> tuple[Courses[Runner], Runner, Call]:
        """The courses of a call's signature, the runner of the call, planned if it is the first of its course, and the
        call, flat."""
        if isinstance(self.fn, torch.nn.Module):
            self._adopt_added(self.fn, placing(self._mesh))
        given = call = flatten_call(self.fn, args, kwargs)
        check_call(self.fn, args, kwargs)
        warn_of_modes(name_of(self.fn))
        check_tensors(call, self.request.device)
        if self.request.inference and torch.is_grad_enabled():
            check_inference(self.fn, call)
        with planning():
            call = self._wholes(args, kwargs, context)
            counting, key, courses = self._calls_like(call, context)
            runner = self._course(courses, counting.tensors)
            if runner is None and counting.numbers:
                runner, counting, key, courses = self._counting(call, counting, key, courses, context)
            elif runner is None:
                runner = self._planned_for(courses, call, context, key)
            if (asks := self._asks | courses.state.reached.asks) != self._asks:
                self._asks = asks
                key = self._signature(counting, context)
            self._planned.keep(key, courses)
            return courses, runner, replace(counting, tensors=(*given.tensors, *counting.tensors[len(given.tensors) :]))

    def _wholes(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> Call:
        """A call, flat, with tensors of the global shape in place of those of which this process has a part."""
        first = FirstCall(self.fn, self.request, flatten_call(self.fn, args, kwargs), context)
        return placing(self._mesh).with_wholes(first, self._mesh)

    @property
    def _mesh(self) -> Mesh | None:
        """The mesh of the request, or that of laid-out parameters."""
        meshes = [self.request.own_mesh, *(layout.mesh for layout in self._layouts.values())]
        return next((mesh for mesh in meshes if mesh is not None), None)

    def _calls_like(self, call: Call, context: ParallelContext) -> tuple[Call, Signature, Courses[Runner]]:
        """A call with changing numbers replaced by tensors, its signature, and the courses of that."""
        while True:
            counting = self._numbers.of(call)
            key = self._signature(counting, context)
            courses = self._planned.find(self.fn, key)
            if courses or not self._numbers.learn(call, counting, key, self._planned.signatures):
                return counting, key, courses

    def _counting(
        self, call: Call, counting: Call, key: Signature, courses: Courses[Runner], context: ParallelContext
    ) -> tuple[Runner, Call, Signature, Courses[Runner]]:
        """The runner of a call with changing numbers that fits none of the `courses`: a new one or, if no graph serves
        all numbers, one for these numbers alone."""
        alone = self._signature(call, context)
        own = self._planned.find(self.fn, alone)
        if not own or self._course(own, call.tensors) is None:
            try:
                return self._planned_for(courses, counting, context, key), counting, key, courses
            except CaptureError:
                if not courses:
                    self._numbers.refuse(counting)
        return self._course(own, call.tensors) or self._planned_for(own, call, context, alone), call, alone, own

    def _planned_for(self, courses: Courses[Runner], call: Call, context: ParallelContext, key: Signature) -> Runner:
        """A new runner for a call of the signature `key` that fits none of the `courses`."""
        if courses:
            return self._new_course(courses, call, context)
        return self._of_new_signature(courses, call, context, key)

    def _of_new_signature(
        self, courses: Courses[Runner], call: Call, context: ParallelContext, key: Signature
    ) -> Runner:
        """Plan the first call of a signature, with the help of calls of other sizes."""
        known = self._planned.signatures
        sizes = self._sizes.of(call, key, known) if self._sizes is not None and not call.numbers else None
        runner = self._new_course(courses, call, context, sizes=sizes)
        if not runner.compiled.plan.certificate.of_other_sizes:
            served = (sizes.alike is not None, sizes.why_not) if sizes else (False, "")
            note_replanning(name_of(self.fn), call.names, key, known, self.searched, *served)
            self.searched += 1
        return runner

    def _course(
        self, courses: Courses[Runner], tensors: Sequence[Tensor], late: Sequence[Answer] = ()
    ) -> Runner | None:
        """The runner of a call of `tensors`; None if no earlier call had the same answers."""
        return courses.of(values_of(tensors, lambda name: attrgetter(name)(self.fn)), late, tensors)

    def _new_course(
        self,
        courses: Courses[Runner],
        call: Call,
        context: ParallelContext,
        late: Sequence[Answer] = (),
        sizes: CallSizes | None = None,
    ) -> Runner:
        """Plan a call that no known course fits."""
        with planning():
            runner = self._plan(call, context, late, sizes)
            courses.add(runner, name_of(self.fn))
        if any(question.draws for question, _ in runner.asked):  # planning restored the generator: draw again
            self._course(courses, call.tensors)
        return runner

    def _signature(self, call: Call, context: ParallelContext) -> Signature:
        """Everything a plan depends on. Of parameters these are the facts that may change: flags, dtypes and shapes."""
        tensors = tuple(
            (tuple(t.shape), t.dtype, t.device, t.requires_grad, placed_as(t), fact(attributes_of(t)))
            for t in call.tensors
        )
        modules, parameters = (
            (self.fn.modules(), self.fn.parameters()) if isinstance(self.fn, torch.nn.Module) else ((), ())
        )
        return Signature(
            structure=call.structure.key(),
            tensors=tensors,
            answers=asked(self._asks, context).answers(call.tensors),
            training=tuple(module.training for module in modules),
            parameters=tuple((type(p), p.requires_grad, p.dtype, tuple(p.shape)) for p in parameters),
            inference=in_inference(self.fn, self.request),
            modes=modes(),
            options=(context, current_algo(), version()),
        )

    def _plan(self, call: Call, context: ParallelContext, late: Sequence[Answer], sizes: CallSizes | None) -> Runner:
        """Capture and plan a call, and lay out the parameters; the first plan with a parameter decides its layout."""
        place, inputs = placing(self._mesh), inputs_on(call, self._mesh)
        first = FirstCall(self.fn, self.request, call, context)
        args, kwargs = place.whole_call(first)
        values = values_of(call.tensors, state_of(self.fn).__getitem__, call.own)

        def planned(inference: bool, alike: Compiled | None = None, advised: bool = True) -> Compiled:
            call_inputs = CallInputs(
                fn=self.fn,
                args=args,
                kwargs=kwargs,
                request=self.request,
                context=context,
                algo=current_algo(),
                processes=place.processes,
                parameters=self._layouts,
                inputs=inputs,
                values=values,
                late=tuple(late),
                memory=place.memory(first),
                inference=inference,
                advised=advised,
                numbers=call.paths,
            )
            compiled = place.agreed_plan(first, lambda: compile_call(call_inputs, alike, sizes))
            if isinstance(self.fn, torch.nn.Module):
                self._settle(self.fn, compiled.plan.parameters, place)
            return compiled

        with meanwhile(planned=self):
            inference, trained = in_inference(self.fn, self.request), None
            if inference and self._not_laid_out():
                with contextlib.suppress(DoesNotFitError):  # the plan is then for inference only
                    trained = planned(inference=False, advised=False)
                self._left_alone |= self._not_laid_out()
            compiled = planned(inference, trained)
        return Runner(self.fn, compiled, place, call.own, self.waiting)

    def _not_laid_out(self) -> frozenset[str]:
        """The parameters without a layout for training, which may follow a call in inference."""
        if self.request.inference or not isinstance(self.fn, torch.nn.Module):
            return frozenset()
        state, known = state_of(self.fn), self._settled | self._left_alone
        laid_out = {id(state[name]) for name in known if name in state}  # by any of the names of tied ones
        return frozenset(n for n, p in state.items() if p.requires_grad and id(p) not in laid_out)

    def _settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout], place: Placing) -> None:
        """Lay out the parameters that no earlier plan laid out."""
        # without the plain tensors of functional_call, which are for this call only
        own = {name for name, tensor in state_of(module).items() if isinstance(tensor, torch.nn.Parameter)}
        fresh = {name: layout for name, layout in layouts.items() if name in own - self._settled}
        place.settle(module, fresh)
        self._settled.update(fresh)
        self._layouts.update(fresh)
        for copied in self._copies:
            if isinstance(copied.fn, torch.nn.Module):
                copied._settle(copied.fn, fresh, place)

    def _adopt_added(self, module: torch.nn.Module, place: Placing) -> None:
        """Lay out the parameters added to `module` since it was sharded: as those that they replaced, if the layout
        fits. The next plan lays out the others."""
        mesh = next((layout.mesh for layout in self._layouts.values()), self.request.own_mesh)
        known: dict[str, Layout] = {}
        for name in place.adopt_added(module, mesh):
            layout, size = self._layouts.get(name), tuple(module.get_parameter(name).shape)
            if layout is not None and layout.fits(size) and layout.chunks(size):
                known[name] = layout
            else:
                self._layouts.pop(name, None)
                self._settled.discard(name)
        place.settle(module, known)

    def _constrained(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call inside a capture, marking annotated arguments and results."""
        name, problems = name_of(self.fn), list[Problem]()
        args, kwargs = constrained_arguments(self.fn, name, self.request, args, kwargs, problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        result = constrained_results(name, self.request, original(*args, **kwargs), problems)
        raise_problems(f"the constraint {name} cannot be met:", problems)
        return result


def _called(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


# A sharded call inside a function that torch.compile compiles: Dynamo does not trace it.
uncompiled: Any = torch.compiler.disable(_called, reason="a sharded call is planned and compiled by Partway")


def is_transformed_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is inside a transform of torch.func, or one of its tensors has a forward-mode tangent."""
    if in_transform():
        return True
    if forward_level() < 0:
        return False
    tensors = [*flatten((args, kwargs))[0], *state_of(fn).values()]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def stands_alone(context: ParallelContext) -> bool:
    """Whether the user chose stand_alone, which runs everything without sharding."""
    return context.mode_was_set and context.parallel_mode == ParallelMode.STAND_ALONE
