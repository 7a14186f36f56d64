"""The arguments of one `shard` or `compile`, checked when they are given: whether the function, the module and the
tensors of calls can be split at all, and whether the module has an engine already."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn

from partway.propagation.graph.structure import Call, name_of, optional_names, place_names
from partway.propagation.plan.plan import Plan
from partway.propagation.torch_internals import is_transformed
from partway.strategy import Mesh, Problem, StrategyError, form_problems, is_one_strategy
from partway.strategy.basics.suggest import either, nearest
from partway.strategy.errors import raise_problems, shown
from partway.strategy.notation import counted

Strategies = tuple[Any, ...] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Request:
    """The arguments of one `shard` or `compile`."""

    in_strategy: Strategies = None
    out_strategy: tuple[Any, ...] | None = None
    parameter_plan: Mapping[str, Any] | None = None
    mesh: Any = None
    device: str | None = None
    level: int = 0
    module_plan: Mapping[str, Any] | None = None
    plan: Any = None
    inference: bool = False
    dynamic: Any = None

    def __post_init__(self) -> None:
        problems = [p for side in _SIDES for p in _tuple_problems(side, getattr(self, side), side)]
        problems += _module_plan_problems(self.module_plan)
        plan: object = self.parameter_plan
        if plan is not None and not isinstance(plan, Mapping):
            fix = 'write a dict from name patterns to strategies, such as {"layers.*.weight": ("tp", None)}'
            problems.append(Problem("parameter_plan", f"is {_kind(plan)}", fix))
        named = {"in_strategy": "an argument's name", "parameter_plan": "a pattern on parameter names"}
        for name, keys in (named | {"module_plan": "a pattern on the paths of modules"}).items():
            given = getattr(self, name)
            wrong = [key for key in given if not isinstance(key, str)] if isinstance(given, Mapping) else []
            problems += [Problem(name, f"has the key {_kind(key)}", f"write {keys}, a str") for key in wrong]
        if type(self.level) is not int or self.level not in (0, 1, 2):
            fix = "write 0 (least communication), 1 (least memory) or 2 (speed)"
            problems.append(Problem("level", f"is {_kind(self.level)}", fix))
        inference: Any = self.inference
        if type(inference) is not bool:
            problems.append(Problem("inference", f"is {_kind(inference)}", "write True or False"))
        problems += _dynamic_problems(self.dynamic)
        if not (self.device is None or (isinstance(self.device, str) and self.device in ("cpu", "cuda"))):
            problems.append(Problem("device", f"is {_kind(self.device)}", "write 'cpu', 'cuda' or None"))
        if not problems:  # a strategy refused as a whole is not refused again by its entries
            problems += [problem for name, strategy in self.given() for problem in form_problems(name, strategy)]
        try:
            self.plans  # noqa: B018 - read once here, so that they are checked with the rest
        except StrategyError as error:
            problems.append(Problem("plan", str(error), "give the path of a file that plan.save wrote, or a Plan"))
        try:
            self.own_mesh  # noqa: B018 - likewise
        except StrategyError as error:
            problems.append(Problem("mesh", str(error), "or leave it out and set device_num in the context"))
        raise_problems(f"{counted(len(problems), 'problem')} with the arguments of shard or compile:", problems)

    @cached_property
    def own_mesh(self) -> Mesh | None:
        """The mesh that was given, or None."""
        return given_mesh(self.mesh)

    @cached_property
    def sizes(self) -> dict[str, dict[int, tuple[int, int] | None]]:
        """The dims that `dynamic` names, by the tensor's or argument's name, with their least and largest size."""
        every = (self.dynamic or {}).items()
        return {name: dict(dims) if isinstance(dims, Mapping) else dict.fromkeys(dims) for name, dims in every}

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The given plans, one for each kind of call."""
        given = self.plan if isinstance(self.plan, list | tuple) else (self.plan,)
        return tuple(_read_plan(found) for found in given if found is not None)

    def given(self) -> list[tuple[str, Any]]:
        """Every strategy, with the name of its place in messages."""
        found = [*_each("in_strategy", self.in_strategy), *_each("out_strategy", self.out_strategy)]
        found += _each("parameter_plan", self.parameter_plan)
        for pattern, sides in (self.module_plan or {}).items():
            for side, strategies in sides.items():
                found += _each(f"module_plan[{pattern!r}][{side!r}]", strategies)
        return found


def _dynamic_problems(dynamic: Any) -> Iterator[Problem]:
    fix = 'write {"ids": {1: (1, 4096)}}, {"ids": (0, 1)}, False for a plan of each size, or None'
    if dynamic is None or dynamic is False:
        return
    if not isinstance(dynamic, Mapping):
        yield Problem("dynamic", f"is {_kind(dynamic)}", fix)
        return
    for name, dims in dynamic.items():
        where = f"dynamic[{name!r}]"
        if not isinstance(name, str):
            yield Problem("dynamic", f"has the key {_kind(name)}", "write an argument's name, a str")
        elif isinstance(dims, str) or not isinstance(dims, Mapping | Collection):
            yield Problem(where, f"is {_kind(dims)}", fix)
        elif wrong := [dim for dim in dims if type(dim) is not int]:
            yield Problem(where, f"has the dim {_kind(wrong[0])}", "write dims by number, such as 0 or -1")
        else:
            for dim, bounds in dims.items() if isinstance(dims, Mapping) else ():
                if bounds is not None and not _is_range(bounds):
                    what = "write the least and the largest size, such as (1, 4096), or None"
                    yield Problem(f"{where}[{dim}]", f"is {shown(bounds)}", what)


def _is_range(bounds: Any) -> bool:
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(type(size) is int for size in bounds)
    return pair and 0 <= bounds[0] <= bounds[1]


def _read_plan(given: Any) -> Plan:
    if isinstance(given, str | PathLike):
        return Plan.load(given)
    if not isinstance(given, Plan):
        raise StrategyError(f"{_kind(given)} is not a plan")
    return given


_SIDES = {"in_strategy": "argument", "out_strategy": "output tensor"}


def _each(name: str, strategies: Any) -> list[tuple[str, Any]]:
    """Each of `strategies`, with the name of its place in messages."""
    if isinstance(strategies, Mapping):
        return [(f"{name}[{key!r}]", s) for key, s in strategies.items()]
    return [(f"{name}[{i}]", s) for i, s in enumerate(strategies or ())]


def _module_plan_problems(plan: object) -> Iterator[Problem]:
    """Why `plan` is not a dict of strategies for the arguments and results of modules."""
    fix = 'write a dict such as {"layers.*.attn": {"in_strategy": (("dp", None, "tp"),), "out_strategy": (...,)}}'
    if plan is not None and not isinstance(plan, Mapping):
        yield Problem("module_plan", f"is {_kind(plan)}", fix)
        return
    for pattern, sides in (plan or {}).items():
        name = f"module_plan[{shown(pattern)}]"
        unknown = [key for key in sides if key not in _SIDES] if isinstance(sides, Mapping) else []
        if unknown:
            yield from (Problem(name, f"has the key {_kind(key)}", f"write {' or '.join(_SIDES)}") for key in unknown)
            continue
        if not isinstance(sides, Mapping) or not sides:
            yield Problem(name, f"is {_kind(sides)}", fix)
            continue
        for side, value in sides.items():
            yield from _tuple_problems(f"{name}[{side!r}]", value, side)


def _tuple_problems(name: str, value: object, side: str) -> Iterator[Problem]:
    """Why `value` does not have one strategy for each argument, or for each output tensor."""
    noun, named = _SIDES[side], ", or a dict by argument name" if side == "in_strategy" else ""
    if value is None or (named and isinstance(value, Mapping)):
        return
    if is_one_strategy(value):
        what = f"{_short(value)} is the strategy of one tensor"
        yield Problem(name, what, f"write a tuple with one for each {noun}, as in ({_short(value)},){named}")
    elif isinstance(value, list):
        yield Problem(name, f"{_short(value)} is a list", f"write the tuple {_short(tuple(value))}{named}")
    elif not isinstance(value, tuple):
        yield Problem(name, f"is {_kind(value)}", f"write a tuple with one strategy (or None) for each {noun}{named}")


def _kind(value: object) -> str:
    return f"{_short(value)} ({type(value).__name__})"


def _short(value: object) -> str:
    return " ".join(shown(value, 80).split())


def given_mesh(mesh: Any) -> Mesh | None:
    """A Mesh from a Mesh, a dict or a DeviceMesh; None for None. Raises StrategyError for any other value."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        return Mesh(mesh)
    if type(mesh).__name__ == "DeviceMesh":
        from partway.strategy.torch_mesh import from_device_mesh

        return from_device_mesh(mesh)
    raise StrategyError(f"it is {_kind(mesh)}; write a Mesh, a dict such as {{'dp': 2, 'tp': 4}}, or a DeviceMesh")


def requests(fn: Any, request: Request) -> Iterator[tuple[str, Request]]:
    """The requests of the sharded modules inside a module, each with the prefix of its parameters' names; `request`
    itself comes last."""
    if isinstance(fn, torch.nn.Module):
        for path, module in fn.named_modules():
            engine = engine_of(module)
            if engine is not None and engine.request is not request:
                yield f"{path}." if path else "", engine.request
    yield "", request


# -- The engine that `shard` attaches to a module: the only place that knows where it is kept. It is in the module's
# `__dict__`, so that pickling and copying a module takes it along. Engines are made in `engine.py`, which imports
# modules that look for engines here

ATTRIBUTE = "_partway"


class Attached(Protocol):
    """The interface of an engine for modules below it: its Request, and the parameters that were DTensors before."""

    @property
    def request(self) -> Any:
        """The Request of the module."""
        ...

    @property
    def own_dtensors(self) -> frozenset[str]:
        """The names of its parameters that were DTensors before it was sharded."""
        ...


def engine_of(value: Any) -> Attached | None:
    """The engine of `value` if it is a sharded module; else None."""
    return value.__dict__.get(ATTRIBUTE) if isinstance(value, nn.Module) else None


def set_engine(module: nn.Module, engine: Attached) -> None:
    """Let `engine` run the calls of `module`."""
    module.__dict__[ATTRIBUTE] = engine


# -- What can be split at all

_LATER: dict[str, Callable[[Any], bool]] = {
    "a generator": inspect.isgeneratorfunction,
    "asynchronous": lambda fn: inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn),
}


def check_target(call: str, fn: Any) -> None:
    """Raise StrategyError unless `fn` is a function or a module that `call` (shard or compile) can take."""
    if isinstance(fn, torch.jit.ScriptModule):
        raise StrategyError(f"{call} takes an eager module, not a scripted one; give it the module that was scripted")
    if isinstance(fn, torch.nn.Module) and isinstance(getattr(fn, "_orig_mod", None), torch.nn.Module):
        raise StrategyError(
            f"{call} takes a module before torch.compile, which only calls it; write torch.compile({call}(module)), or "
            "set_auto_parallel_context(backend='inductor'), which compiles what each rank runs"
        )
    if call == "shard" and isinstance(fn, torch.nn.Module) and "forward" in vars(fn):
        kind = type(fn).__name__
        raise StrategyError(
            f"the object of {kind} has a forward of its own (model.forward = ...), which would run in place of a plan; "
            f"write it as the forward of a class derived from {kind}, or assign it after shard"
        )
    if isinstance(fn, torch.nn.Module) and any(map(torch.nn.parameter.is_lazy, fn.parameters())):
        raise StrategyError(f"{type(fn).__name__} has parameters without a shape yet; call it once before {call}")
    if isinstance(fn, type):
        raise StrategyError(f"{call} takes an nn.Module object, not the class {fn.__name__}; write {fn.__name__}(...)")
    body = fn.forward if isinstance(fn, torch.nn.Module) else fn
    for kind, is_one in _LATER.items():
        if is_one(body):
            raise StrategyError(
                f"{call} takes a function whose call computes its result, and {name_of(fn)} is {kind}, which computes "
                "when it is asked for one; shard what it calls"
            )
    if not callable(fn) or getattr(type(fn), "forward", None) is torch.nn.Module.forward:
        text = type(fn).__name__ if isinstance(fn, torch.Tensor | torch.nn.Module) else shown(fn)
        raise StrategyError(f"{call} takes a function or an nn.Module object with a forward, not {text}")


def check_inference(fn: Any, call: Call) -> None:
    """Raise StrategyError if a tensor of `call` requires a gradient; plans of `fn` have no backward."""
    asking = (name for name, tensor in zip(call.names, call.tensors, strict=True) if tensor.requires_grad)
    raise_problems(
        f"{name_of(fn)} was sharded with inference=True, which gives no gradient:",
        [Problem(f"input {name!r}", "requires one", "detach it, or call under torch.no_grad()") for name in asking],
    )


_TRANSFORMED = (
    "is inside a transform of torch.func (vmap, grad, jvp, ...)",
    "plan outside of it; a sharded function may be called inside",
)


def check_tensors(call: Call, device: str | None) -> None:
    """Raise StrategyError unless every tensor can be split and is on a device of type `device` (None: any)."""
    problems = []
    for name, tensor in zip(call.names, call.tensors, strict=True):
        where = f"input {name!r}"
        if is_transformed(tensor):
            problems.append(Problem(where, *_TRANSFORMED))
        elif tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            problems.append(Problem(where, f"is a {kind} tensor", "give a dense one, as with .to_dense()"))
        elif device is not None and tensor.device.type not in (device, "meta"):
            what = f"is on {tensor.device}, and device={device!r} was asked for"
            problems.append(Problem(where, what, f"move it with .to({device!r})"))
    raise_problems("the tensors of the call cannot be split:", problems)


# -- The arguments and results of a call to which the entries of a request belong


def by_argument(fn: Any, strategies: Strategies, present: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """The strategy of each argument by name. `present`: the arguments with tensors in a call; an argument that is None
    by default may be missing (labels, in evaluation), and its strategy is then ignored."""
    if strategies is None:
        return {}
    if isinstance(strategies, Mapping):
        by_name = dict(strategies)
    else:
        places = place_names(fn, len(strategies))
        if len(strategies) > len(places):
            what = f"has {counted(len(strategies), 'entry', 'entries')} for {counted(len(places), 'argument')}"
            listed = f" ({', '.join(places)})" if places else ""
            problems.append(Problem("in_strategy", what + listed, "write one entry per argument, in order"))
        by_name = dict(zip(places, strategies, strict=False))
    known = place_names(fn, len(by_name) + 64)
    for name, strategy in by_name.items():
        if strategy is not None and name not in present and name not in optional_names(fn):
            what = "the call passes no tensor for it" if name in known else "there is no such argument"
            others = nearest(name, present) or present
            fix = f"annotate {either(map(repr, others))}" if others else "the call passes no tensors at all"
            problems.append(Problem(f"in_strategy[{name!r}]", what, fix))
    return by_name


def check_out_strategy(strategies: Sequence[Any] | None, results: int, problems: list[Problem]) -> None:
    """Add a problem if an out_strategy has more entries than there are output tensors (`results`)."""
    if strategies is not None and len(strategies) > results:
        what = f"has {counted(len(strategies), 'entry', 'entries')} for {counted(results, 'output tensor')}"
        problems.append(Problem("out_strategy", what, "write one entry per output tensor, in order"))
