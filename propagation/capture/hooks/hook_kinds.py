"""Kinds of hooks: those that belong to a model, that only look, or that compute parameters."""

from __future__ import annotations

import dis
import functools
import itertools
from typing import Any

from torch import nn

from ...torch_internals import hook_flags, hooks_in

KINDS = ("forward_pre", "forward", "backward_pre", "backward")
_OF_MODELS = ("torch", "transformers")  # their hooks are part of the models: they compute parameters, and fill results
_KEEPS = frozenset({"STORE_SUBSCR", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"})
_KEEPING = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "register_hook", "retain_grad", "setdefault", "update"}
)


def stores_of(module: nn.Module, kind: str) -> list[dict[int, Any]]:
    """The dicts in which a module keeps its hooks of a kind, and their flags."""
    hooks = hooks_in(module, kind)
    return [hooks, hook_flags(module, kind)] if kind in ("forward_pre", "forward") else [hooks]


def _package(hook: Any) -> str:
    """The package that a hook comes from."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def is_part(hook: Any) -> bool:
    """Whether a hook belongs to the library that the model is written with."""
    return _package(hook) in _OF_MODELS or computes_parameters(hook)


def tracks(hook: Any) -> bool:
    """Whether a hook lets PyTorch's counters and profilers track the running module. It is not part of a program, in
    which inner modules do not run."""
    return getattr(hook, "__module__", "") == "torch.utils.module_tracker"


def computes_parameters(hook: Any) -> bool:
    """Whether a hook is from torch.nn.utils and computes a parameter of its module before the forward."""
    return any(cls.__module__.startswith("torch.nn.utils.") for cls in type(hook).__mro__)


def only_looks(hook: Any) -> bool:
    """Whether the code of a hook shows that it returns None, keeps nothing and calls no method that writes in place."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or any(name in _KEEPING or (name.endswith("_") and name[0] != "_") for name in code.co_names):
        return False
    for before, step in itertools.pairwise(dis.get_instructions(code)):
        nothing = before.opname == "LOAD_CONST" and before.argval is None
        if step.opname in _KEEPS or (step.opname == "RETURN_VALUE" and not nothing):
            return False
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
    return True
