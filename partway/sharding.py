"""`shard` and `compile`: the entry points, for an eager function, also as a decorator, and for an nn.Module.

Inside a function that is being sharded, `shard` is a constraint. Each sharded function or module has one engine
(engine.py); `compile` plans without one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import torch

from partway.compiler.capture_call import CallInputs, in_inference
from partway.compiler.compiled import Compiled
from partway.compiler.driver import compile_call
from partway.engine.engine import Engine, attached_engine, stands_alone, uncompiled
from partway.engine.placing import placing
from partway.engine.sharded import ShardedModule, sharded_class
from partway.options.context import current, current_algo
from partway.propagation.capture.export.tracing import capturing
from partway.propagation.graph.structure import check_call, flatten_call, name_of, state_of
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.requests.dtensors import inputs_on, own_dtensors, parameters_on, plain
from partway.requests.request import Request, check_target, check_tensors, engine_of, set_engine
from partway.reuse.courses import values_of
from partway.strategy import Layout, StrategyError

M = TypeVar("M", bound=torch.nn.Module)
P = ParamSpec("P")
R = TypeVar("R")
InStrategy = tuple[Any, ...] | Mapping[str, Any] | None
OutStrategy = tuple[Any, ...] | None


class _Others(TypedDict, total=False):
    parameter_plan: Mapping[str, Any] | None
    mesh: Any
    device: str | None
    level: int
    module_plan: Mapping[str, Any] | None
    plan: Any
    inference: bool
    dynamic: Any


class _Decorator(Protocol):
    """The decorator that `shard` returns without a function: it keeps a module's class and a function's signature."""

    @overload
    def __call__(self, fn: M, /) -> M: ...  # type: ignore[overload-overlap]  # modules can be called
    @overload
    def __call__(self, fn: Callable[P, R], /) -> ShardedFunction[P, R]: ...


@overload
def shard(  # type: ignore[overload-overlap]  # modules can be called
    fn: M, in_strategy: InStrategy = None, out_strategy: OutStrategy = None, **others: Unpack[_Others]
) -> M: ...
@overload
def shard(
    fn: Callable[P, R], in_strategy: InStrategy = None, out_strategy: OutStrategy = None, **others: Unpack[_Others]
) -> ShardedFunction[P, R]: ...
@overload
def shard(
    fn: None = None, in_strategy: InStrategy = None, out_strategy: OutStrategy = None, **others: Unpack[_Others]
) -> _Decorator: ...
def shard(
    fn: Any = None,
    in_strategy: InStrategy = None,
    out_strategy: OutStrategy = None,
    *,
    parameter_plan: Mapping[str, Any] | None = None,
    mesh: Any = None,
    device: str | None = None,
    level: int = 0,
    module_plan: Mapping[str, Any] | None = None,
    plan: Any = None,
    inference: bool = False,
    dynamic: Any = None,
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
    level           what the search weighs most: 0 communication, 1 memory, 2 speed: it searches at several prices of
                    communication, and takes the plan with the shortest predicted step, overlap included
    module_plan     a dict from fnmatch patterns on the paths of modules inside to what goes into them and comes out,
                    {"layers.*.attn": {"in_strategy": (("dp", None, "tp"),), "out_strategy": (...,)}} (modules only)
    plan            the path of a file that `plan.save` wrote, a Plan, or a tuple of them: the strategies of all
                    operators come from it, without a search. A call for which no plan was made raises an error that
                    says what differs; other annotations must agree
    inference       no gradient is ever taken: plans have no backward, save nothing for one, and choose the layouts of
                    parameters without one. Otherwise calls in torch.inference_mode(), and those of a module in
                    evaluation under torch.no_grad(), have plans without a backward and the layouts for training
    dynamic         the dims of arguments whose sizes change, with the least and largest size, {"ids": {1: (1, 4096)}},
                    or without, {"ids": (0, 1)}: one plan serves them all from the first call on, and another size is an
                    error. None: dims are found as their sizes change. False: each size has a plan of its own

    The first call with a new signature (shapes, dtypes, modes) captures and plans; later ones only run. At the second
    size of a dim, one plan is made for all of its sizes except 0 and 1; a new size then takes only the time to make its
    program. If a launcher started this process, it runs its own rank; otherwise it simulates all ranks.

    Each result has its own memory. Where results on one device are views of one another (`return y, y[1:]`), or of an
    argument, a parameter or a buffer, a write to one is not seen in the others; write before they are returned.

    Inside a function that is being sharded, `shard` only constrains the arguments and results of a function, a module
    or a method.

    Raises StrategyError for wrong arguments, here or at the call that shows their shapes. A failure changes nothing:
    after a refused first call, `shard` takes the same module again with other annotations.
    """
    request = Request(
        in_strategy=in_strategy,
        out_strategy=out_strategy,
        parameter_plan=parameter_plan,
        mesh=mesh,
        device=device,
        level=level,
        module_plan=module_plan,
        plan=plan,
        inference=inference,
        dynamic=dynamic,
    )
    if fn is None:
        return functools.partial(_shard, request=request)
    return _shard(fn, request)


def _shard(fn: Any, request: Request) -> Any:
    before: Engine | None = None
    if isinstance(fn, ShardedFunction):
        before = fn._engine
    elif isinstance(fn, ShardedModule):  # an interrupted shard may have left an engine on a module that is not
        before = attached_engine(fn) if engine_of(fn) is not None else None
    if before is not None and not before.refused:
        raise StrategyError(f"{name_of(fn)} is sharded already; call shard once, with all annotations")
    check_target("shard", fn)
    if isinstance(fn, torch.nn.Module) and before is not None:
        set_engine(fn, Engine(fn, request, parameters_on(fn, before.own_dtensors, request.own_mesh)))
        return fn
    if isinstance(fn, torch.nn.Module):
        _check_names(fn)
        engine = Engine(fn, request, parameters_on(fn, own_dtensors(fn), request.own_mesh))
        if not stands_alone(current()):
            placing(request.own_mesh).adopt(fn, current(), request)
        set_engine(fn, engine)
        kind: Any = type(fn)
        fn.__class__ = sharded_class(kind)
        return fn
    if request.parameter_plan:
        raise StrategyError("parameter_plan needs an nn.Module; annotate a function's arguments with in_strategy")
    original: Any = fn if before is None else before.fn
    return ShardedFunction(original, request)


def _check_names(module: torch.nn.Module) -> None:
    """Raise StrategyError if `module` has attributes of the same names as ours, which its own code would get."""
    own = vars(module)
    inside = {*own, *own["_modules"], *own["_parameters"], *own["_buffers"]}
    names = [name for name in vars(ShardedModule) if not name.startswith("_")]
    taken = [name for name in names if name in inside or inspect.getattr_static(type(module), name, None) is not None]
    if taken:
        raise StrategyError(
            f"{name_of(module)} has an attribute of its own called {', '.join(map(repr, taken))}, and so has every "
            "sharded module (as model.plan); rename it, or shard a module around it"
        )


class ShardedFunction(Generic[P, R]):
    """A function that runs split. `plan` and `program` are those of its last call."""

    def __init__(self, fn: Callable[P, R], request: Request) -> None:
        functools.update_wrapper(self, fn)
        self._engine = Engine(fn, request)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R
        if torch.compiler.is_dynamo_compiling():
            result = uncompiled(self, args, kwargs)
        else:
            result = self._engine.call(args, kwargs)
        return result

    def __reduce__(self) -> Any:
        """Pickle a decorated function by name, as functions are."""
        path: str = getattr(self, "__qualname__", "")  # the function's
        named: Any = sys.modules.get(self.__module__)
        for name in path.split("."):
            named = getattr(named, name, None)
        return path if named is self else (ShardedFunction, (self._engine.fn, self._engine.request))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if capturing() or stands_alone(current()):
            return ShardedFunction(MethodType(self._engine.fn, instance), self._engine.request)
        raise StrategyError(
            f"{name_of(self)} is a method; shard the module it belongs to, or a function of its tensors"
        )

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Plan a call and make its program, without running it: see `ShardedModule.prepare`."""
        return self._engine.prepare(args, kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        return self._engine.latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return self._engine.latest().program


def compile(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    in_strategy: tuple[Any, ...] | Mapping[str, Any] | None = None,
    out_strategy: tuple[Any, ...] | None = None,
    parameter_plan: Mapping[str, Any] | None = None,
    device: str | None = None,
    level: int = 0,
    module_plan: Mapping[str, Any] | None = None,
    plan: Any = None,
    inference: bool = False,
) -> Compiled:
    """Plan a call of a function or module without running it; its tensors may be on the meta device.

    The arguments are those of `shard`. Needs no process group and no second device.

    Raises StrategyError for annotations that cannot be satisfied (all reasons at once), CaptureError for a function
    that torch.export cannot capture, and OperatorError for an operator without a rule if `on_unknown_op` is "error".
    """
    request = Request(in_strategy, out_strategy, parameter_plan, mesh, device, level, module_plan, plan, inference)
    check_target("compile", fn_or_module)
    if not isinstance(args, tuple | list):
        raise StrategyError(
            f"args is a {type(args).__name__}; write the arguments of the call as a tuple, such as (x,)"
        )
    if not isinstance(kwargs, Mapping | None):
        raise StrategyError(f"kwargs is a {type(kwargs).__name__}; write a dict from argument names to values")
    args, kwargs = tuple(args), dict(kwargs or {})
    check_call(fn_or_module, args, kwargs)
    call = flatten_call(fn_or_module, args, kwargs)
    check_tensors(call, None)
    parameters: dict[str, Layout] = {}
    if isinstance(fn_or_module, torch.nn.Module):
        parameters = parameters_on(fn_or_module, own_dtensors(fn_or_module), request.own_mesh)
    inputs = inputs_on(call, request.own_mesh or next((layout.mesh for layout in parameters.values()), None))
    plain_args, plain_kwargs = call.structure.build([plain(tensor) for tensor in call.tensors])
    values = values_of(call.tensors, state_of(fn_or_module).__getitem__)
    return compile_call(
        CallInputs(
            fn_or_module, plain_args, plain_kwargs, request, current(), current_algo(), parameters=parameters,
            inputs=inputs, values=values, inference=in_inference(fn_or_module, request),
        )
    )  # fmt: skip
