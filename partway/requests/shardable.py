"""Checks that functions, modules and the tensors of sharded calls can be split at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from partway.propagation.graph.structure import Call, name_of
from partway.propagation.torch_internals import is_transformed
from partway.strategy import Problem, StrategyError, raise_problems
from partway.strategy.errors import shown

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
