"""Optimizers whose parameters were replaced or laid out anew.

An optimizer holds parameters as objects, and nothing leads from a parameter to its optimizers. But PyTorch says when an
optimizer is about to step, which is the first time that it matters:

    of a parameter that was replaced    the step is refused: it would train what no module uses
    of one that was laid out anew       the states that are like it are laid out as it is, before they are used

An optimizer is looked at once after each such change, and when it has other parameters; any other step costs a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..strategy.errors import RuntimeStateError
from ..strategy.layout import Layout

LayOut = Callable[[Tensor, Layout], Tensor]

_replaced: Any = WeakTensorKeyDictionary()  # the names of parameters that no module uses any longer
_laid_out: WeakKeyDictionary[nn.Module, tuple[Mapping[str, Layout], LayOut]] = WeakKeyDictionary()
_seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = WeakKeyDictionary()
_changes = 0


def replaced(names: Mapping[Tensor, str]) -> None:
    """From now on an optimizer of one of these parameters raises RuntimeStateError when it steps."""
    _replaced.update(names)
    _changed()


def laid_out(module: nn.Module, layouts: Mapping[str, Layout], lay_out: LayOut) -> None:
    """Parameters of `module` have new layouts, by their names; `lay_out` gives an optimizer's state a layout."""
    _laid_out[module] = {**_laid_out.get(module, ({}, lay_out))[0], **layouts}, lay_out
    _changed()


def _changed() -> None:
    global _changes  # noqa: PLW0603 - what optimizers were made of is a matter of the process
    _changes += 1
    _listen()


@functools.cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    now = (_changes, *(len(group["params"]) for group in optimizer.param_groups))
    if _seen.get(optimizer) != now:
        _check_current(optimizer)
        _lay_out_states(optimizer)
        _seen[optimizer] = now


def _check_current(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeStateError if `optimizer` holds a parameter that was replaced."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                raise RuntimeStateError(
                    f"{type(optimizer).__name__} was made of parameter {_replaced[parameter]} before its module was "
                    "sharded, and would step what the module no longer uses; call shard first, then make the optimizer "
                    "of the sharded module's parameters"
                )


def _lay_out_states(optimizer: torch.optim.Optimizer) -> None:
    """Lay out what `optimizer` keeps for each parameter, and is like it, as the parameter is."""
    for module, (layouts, lay_out) in list(_laid_out.items()):
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, layout in layouts.items():
            parameter = parameters.get(name)
            state = optimizer.state.get(parameter) if parameter is not None else None
            if parameter is not None and state:
                state |= {key: lay_out(v, layout) for key, v in state.items() if _is_like(v, parameter)}


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
