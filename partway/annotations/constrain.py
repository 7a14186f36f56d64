"""Constraints on calls inside a captured function: of sharded functions, and of modules that a module_plan names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from partway.annotations.constraint_text import constraint_text
from partway.propagation.graph.structure import flatten, flatten_call
from partway.propagation.ops.collectives import constrain
from partway.requests.request import Request, by_argument, check_out_strategy, requests
from partway.strategy import Problem, raise_problems
from partway.strategy.basics.blocks import afterwards
from partway.strategy.basics.suggest import did_you_mean, there_are


def constrained_arguments(
    fn: Any, name: str, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], problems: list[Problem]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `fn`, in messages `name`; those with a strategy in `request` are marked."""
    call = flatten_call(fn, args, kwargs)
    by_name = by_argument(fn, request.in_strategy, call.arguments, problems)
    marked = [
        _mark(tensor, by_name.get(argument), request, f"argument {label!r} of {name}")
        for tensor, argument, label in zip(call.tensors, call.arguments, call.names, strict=True)
    ]
    args, kwargs = call.structure.build(marked)
    return args, kwargs


def constrained_results(name: str, request: Request, result: Any, problems: list[Problem]) -> Any:
    """The result of a call; tensors with a strategy in `request` are marked."""
    if request.out_strategy is None:
        return result
    tensors, structure = flatten(result)
    check_out_strategy(request.out_strategy, len(tensors), problems)
    wanted = [*request.out_strategy, *[None] * len(tensors)]
    return structure.build(
        [_mark(t, s, request, f"output {i} of {name}") for i, (t, s) in enumerate(zip(tensors, wanted, strict=False))]
    )


def _mark(tensor: Tensor, strategy: Any, request: Request, name: str) -> Tensor:
    if strategy is None:
        return tensor
    marked: Tensor = constrain(tensor, constraint_text(name, strategy, request.own_mesh, tensor.ndim), name)
    return marked


@contextmanager
def constrained_modules(fn: Any, request: Request) -> Iterator[None]:
    """A block that captures `fn`, with constraints on calls of the modules inside it that a module_plan names.

    Raises StrategyError for patterns that match no module, or only modules that are not called, for two patterns with
    strategies for the same side of a module, and for strategies that do not fit its arguments and results.
    """
    problems: list[Problem] = []
    plans = dict(_planned(fn, request, problems))
    raise_problems("the module_plan cannot be met:", problems)
    hooks: list[RemovableHandle] = []

    def restore() -> None:
        for hook in hooks:
            hook.remove()

    with afterwards(restore):
        for module, planned in plans.items():
            hooks.extend(_hooked(module, planned, problems))
        yield
    called = {source for planned in plans.values() if planned.called for source in planned.sources}
    fix = "name one that is called: this one only holds others, or is not in use"
    every = dict.fromkeys(source for planned in plans.values() for source in planned.sources)
    problems += [Problem(source, "matches no module that is called", fix) for source in every if source not in called]
    raise_problems("the module_plan cannot be met:", problems)


@dataclass
class _Planned:
    """The strategies that module_plans have for a module, their sources, and whether the module was called."""

    path: str
    request: Request
    sources: frozenset[str]
    called: bool = False


def _hooked(module: torch.nn.Module, planned: _Planned, problems: list[Problem]) -> Iterator[RemovableHandle]:
    """Hooks that mark the arguments and results of `module`."""
    name = f"module {planned.path!r}"

    def add(own_problems: list[Problem]) -> None:
        problems.extend(replace(problem, where=f"{name}, {problem.where}") for problem in own_problems)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        planned.called, own_problems = True, list[Problem]()
        marked = constrained_arguments(module, name, planned.request, args, kwargs, own_problems)
        add(own_problems)
        return marked

    def after(module: Any, args: Any, result: Any) -> Any:
        own_problems: list[Problem] = []
        marked = constrained_results(name, planned.request, result, own_problems)
        add(own_problems)
        return marked

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)


def _planned(fn: Any, request: Request, problems: list[Problem]) -> Iterator[tuple[torch.nn.Module, _Planned]]:
    """Each module inside `fn` that a pattern matches, with the strategies of all its patterns."""
    if not isinstance(fn, torch.nn.Module):
        if request.module_plan:
            fix = "annotate its arguments with in_strategy, or shard functions that it calls"
            problems.append(Problem("module_plan", "is for the modules inside a module, but this is a function", fix))
        return
    modules = dict(list(fn.named_modules(remove_duplicate=False))[1:])
    plans: dict[torch.nn.Module, tuple[str, dict[str, tuple[str, Any]], Any]] = {}
    for prefix, outer in requests(fn, request):
        for pattern, strategies_by_side in (outer.module_plan or {}).items():
            source = f"module_plan[{prefix + pattern!r}]"
            matched = {module: path for path, module in modules.items() if fnmatchcase(path, prefix + pattern)}
            if not matched:
                fix = did_you_mean(prefix + pattern, modules, there_are("modules inside", modules))
                problems.append(Problem(source, "matches no module", fix))
            for module, path in matched.items():
                _, sides, _ = plans.setdefault(module, (path, {}, outer.mesh))
                for side, strategies in strategies_by_side.items():
                    if side in sides:
                        what = f"{sides[side][0]} and {source} both have an {side} for it"
                        problems.append(Problem(f"module {path!r}", what, "let one pattern match it"))
                    sides[side] = source, strategies
    for module, (path, sides, mesh) in plans.items():
        inner = Request(**{side: strategies for side, (_, strategies) in sides.items()}, mesh=mesh)
        yield module, _Planned(path, inner, frozenset(source for source, _ in sides.values()))
