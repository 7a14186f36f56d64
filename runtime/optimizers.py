"""Optimizers whose parameters were replaced or laid out anew.

An optimizer holds parameters as objects, and nothing leads from a parameter to its optimizers. But PyTorch says when an
optimizer is about to step, which is the first time that it matters:

    of a parameter that was replaced    it gets the new one, with the states of the old one
    of one that was laid out anew       the states that are like it are laid out as it is, before they are used

An optimizer is looked at once after each such change, and when it has other parameters; any other step costs a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .replaced import current
from .split_tensor import placed_like

_modules: WeakSet[nn.Module] = WeakSet()  # whose parameters Partway lays out
_seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = WeakKeyDictionary()
_changes = 0
_COUNTS = {"step", "mu_product", "mu", "eta"}  # what PyTorch's optimizers keep of a parameter as one number


def changed(module: nn.Module) -> None:
    """Parameters of `module` were replaced or laid out: every optimizer is looked at again when it steps."""
    global _changes  # noqa: PLW0603 - what optimizers were made of is a matter of the process
    _changes += 1
    _modules.add(module)
    _listen()


@functools.cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    now = (_changes, *(len(group["params"]) for group in optimizer.param_groups))
    if _seen.get(optimizer) != now:
        bring_up_to_date(optimizer)
        _seen[optimizer] = now


def bring_up_to_date(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` the parameters that have taken the place of its own, and lay out its states like them."""
    ours = {id(parameter) for module in _modules for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for i, held in enumerate(group["params"]):
            new = group["params"][i] = current(held)  # in place: some optimizers keep the list
            if (state := optimizer.state.pop(held, None)) is not None:
                placed = id(new) in ours and isinstance(new, DTensor)
                optimizer.state[new] = _placed(state, new) if placed else state


def _placed(state: Any, parameter: DTensor) -> dict[str, Any]:
    """What an optimizer keeps for `parameter`, placed like it where it has an entry for each of its elements."""
    return {
        key: placed_like(v, parameter) if isinstance(v, Tensor) and by_element(key, v.shape, parameter) else v
        for key, v in state.items()
    }


def by_element(key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether what an optimizer keeps of `parameter` under `key`, a tensor of `shape`, has an entry for each of its
    elements. For a parameter that is one number the shape does not say it."""
    return tuple(shape) == tuple(parameter.shape) and key not in _COUNTS
