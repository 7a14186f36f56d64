"""`partway plan module:function`: plan your own model without a script.

The model is built and planned on the meta device, without memory for it, a process group or a second device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partway.commands.named import call, find, kind_of
from partway.commands.spelling import bytes_of, input_of, mesh_of, strategy_of
from partway.options.context import set_algo_parameters, set_auto_parallel_context
from partway.propagation.plan.plan import Plan
from partway.propagation.torch_internals import tree_map
from partway.sharding import compile
from partway.strategy.errors import RuntimeStateError, StrategyError, shown

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class CommandLine:
    """The arguments of the command line, as text.

    model         module:function or file.py:function: a function, or a class of modules, without arguments
    mesh          dp=2,tp=4; "": the cheapest that `devices` can form
    inputs        float32[16,64] for each argument, if the function returns only a model
    real          whether the model and its inputs are made with values, on the CPU
    """

    model: str
    mesh: str = ""
    devices: int | None = None
    inputs: Sequence[str] = ()
    in_strategy: Sequence[str] = ()
    out_strategy: Sequence[str] = ()
    parameters: Sequence[str] = ()
    profile: str | None = None
    memory_limit: str | None = None
    search_mode: str | None = None
    inference: bool = False
    real: bool = False


@dataclass(frozen=True)
class Model:
    """The call of `module` to be planned."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def planned(asked: CommandLine) -> Plan:
    """The plan of the model on the command line. Sets options of the context for the whole process.

    Raises StrategyError for text that does not parse or strategies that cannot be satisfied, RuntimeStateError for a
    model that is not found or raises, and the errors of `compile`.
    """
    if not asked.mesh and asked.devices is None:
        raise StrategyError("on which devices? write --mesh dp=2,tp=4, or --devices 8 for the cheapest mesh of eight")
    if asked.mesh and asked.devices is not None:
        raise StrategyError("--mesh says how many devices there are; leave --devices out")
    mesh = mesh_of(asked.mesh) if asked.mesh else None
    parameters = dict(_parameter(text) for text in asked.parameters)
    inputs = _strategies("--in", asked.in_strategy)
    outputs = tuple(strategy_of("--out", text) for text in asked.out_strategy)
    options = {"device_num": asked.devices, "device_profile": asked.profile, "search_mode": asked.search_mode}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    set_auto_parallel_context(**given)
    if asked.memory_limit is not None:
        set_algo_parameters(memory_limit=bytes_of("--memory-limit", asked.memory_limit))
    model = model_of(asked)
    try:
        return compile(
            model.module,
            model.args,
            model.kwargs,
            mesh=mesh,
            in_strategy=inputs or None,
            out_strategy=outputs or None,
            parameter_plan=parameters or None,
            inference=asked.inference,
        ).plan
    except TypeError as error:  # the arguments do not fit its forward
        raise RuntimeStateError(f"{asked.model}: {error}") from error


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, strategy = text.partition("=")
    if not name or not equals:
        raise StrategyError(f"--param {shown(text)} is not NAME=STRATEGY; write it as in 'blocks.*.weight=tp,None'")
    return name, strategy_of("--param", strategy)


def _strategies(option: str, texts: Sequence[str]) -> Any:
    """The strategies of arguments: a tuple by position, or a dict if they have names."""
    named = {name: strategy_of(option, rest) for name, equals, rest in (t.partition("=") for t in texts) if equals}
    if not named:
        return tuple(strategy_of(option, text) for text in texts)
    if len(named) != len(texts):
        raise StrategyError(f"{option}: name each argument, once, as in x=dp,None; or none, and write them in order")
    return named


# -- The model ---------------------------------------------------------------------------------------------------------


def model_of(asked: CommandLine) -> Model:
    """The model and its call to be planned. Raises RuntimeStateError if it cannot be made."""
    build = find(asked.model)
    if isinstance(build, nn.Module):  # a model made at import
        return _with_inputs(asked, build)
    _check_parameters(build, asked.model)
    with nullcontext() if asked.real else torch.device("meta"):
        made = call(build, _called(build, asked.model, asked.real))
    if isinstance(made, nn.Module):
        return _with_inputs(asked, made)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise RuntimeStateError(
            f"{asked.model} must return an nn.Module, or (an nn.Module, its inputs), not {kind_of(made)}"
        )
    if asked.inputs:
        raise RuntimeStateError(f"{asked.model} returns a model with its inputs; leave --input out")
    model, inputs = made
    return _placed(Model(model, *_arguments(inputs, asked.model)), asked.real)


def _called(build: Callable[..., Any], name: str, real: bool) -> str:
    hint = "" if real else ", on the meta device, where tensors have no values (--real gives them some)"
    return f"{name}(){hint},"


def _check_parameters(build: Callable[..., Any], name: str) -> None:
    """Raise RuntimeStateError unless `build` can be called without arguments."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in kinds]
    if missing:
        raise RuntimeStateError(
            f"{name} is called without arguments, and needs {', '.join(missing)}; give them defaults, or name a "
            "function that makes the model"
        )


def _with_inputs(asked: CommandLine, model: nn.Module) -> Model:
    if not asked.inputs:
        raise RuntimeStateError(
            f"{asked.model} is a model alone; say what it is called with, as in --input 'float32[16,64]' for each "
            "argument, or have the function return (model, inputs)"
        )
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for text in asked.inputs:
        name, dtype, shape = input_of(text, DTYPES)
        tensor = torch.zeros(shape, dtype=DTYPES[dtype], device="cpu" if asked.real else "meta")
        if name in kwargs or (kwargs and not name):
            raise StrategyError(f"--input {shown(text)}: arguments with names come last, each once")
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return _placed(Model(model, tuple(args), kwargs), asked.real)


def _arguments(inputs: Any, name: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments that a function returns: a tensor, a tuple or list of arguments, or a dict by name."""
    match inputs:
        case Tensor():
            return (inputs,), {}
        case Mapping() if all(isinstance(key, str) for key in inputs):
            return (), inputs
        case tuple() | list():
            return tuple(inputs), {}
    raise RuntimeStateError(
        f"the inputs that {name} returns must be a tensor, a tuple of arguments or a dict by name, not "
        f"{kind_of(inputs)}"
    )


def _placed(model: Model, real: bool) -> Model:
    """The call with all of its tensors on the meta device, wherever the function made them."""
    if real:
        return model

    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    args, kwargs = tree_map(moved, (model.args, dict(model.kwargs)))
    return Model(model.module.to("meta"), args, kwargs)
