"""Optimizers of the parameters that Partway lays out: the updates that each needs before it steps.

An optimizer holds parameters as objects, and nothing leads from a parameter to its optimizers. But PyTorch calls a hook
when an optimizer is about to step, which is the first time that it matters:

    for a parameter that was replaced    it gets the new one, with the states of the old one
    for one that was laid out anew       states of its shape are laid out like it, before they are used

This happens once after each such change, and when an optimizer has other parameters. With several ranks, each step also
reports the optimizer's settings to the ledger, and samples of the gradients and states that other ranks hold, too
(`replicas.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..ranks.replicas import in_turn, ledger_of, note, ranks_of, settings_of
from ..ranks.watch import Watch, comparing
from .replaced import current
from .split_tensor import placed_like
from .tracked import TRACKED

_SEEN = "_partway_seen"  # an attribute of gradients with which an optimizer has stepped
_COUNTS = {"step", "mu_product", "mu", "eta"}  # states of PyTorch's optimizers with one number a parameter


def changed(module: nn.Module) -> None:
    """Mark that parameters of `module` were replaced or laid out: every optimizer is checked again when it steps."""
    TRACKED.changes += 1
    TRACKED.modules.add(module)
    if not TRACKED.listening:
        register_optimizer_step_pre_hook(_before_step)
        TRACKED.listening = True


@dataclass
class _Known:
    """The facts about an optimizer: the `state` for which it was checked; the `names` of our parameters in it; the
    number of `steps` since it was first seen."""

    state: tuple[int, ...] = ()
    names: list[tuple[str, Tensor]] = field(default_factory=list)
    steps: int = 0


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known: _Known | None = TRACKED.optimizers.get(optimizer)
    if known is None:
        known = TRACKED.optimizers[optimizer] = _Known()
        optimizer.register_load_state_dict_post_hook(_after_load)
    now = (TRACKED.changes, *(len(group["params"]) for group in optimizer.param_groups))
    if known.state != now:
        bring_up_to_date(optimizer)
        named = {id(p): (name, p) for module in TRACKED.modules for name, p in module.named_parameters()}
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        known.state, known.names = now, [named[id(p)] for p in held if id(p) in named]
    known.steps += 1
    if known.names and (own := comparing()) is not None:
        _tell(own, optimizer, known)


def _after_load(optimizer: torch.optim.Optimizer) -> None:
    """Report the load to the ledger: a split state has no copy on other ranks to compare."""
    known = TRACKED.optimizers[optimizer]
    if known.names and comparing() is not None:
        ledger_of(_among(known)).settings("loaded", f"the load_state_dict of {type(optimizer).__name__}")


def _tell(own: Watch, optimizer: torch.optim.Optimizer, known: _Known) -> None:
    """Report to the ledger the settings, gradients and states with which the optimizer is about to step."""
    own.check()
    assert own.look_every is not None
    among = _among(known)
    where, ledger = f"step {known.steps} of {type(optimizer).__name__}", ledger_of(among)
    ledger.settings(type(optimizer).__qualname__, f"{where}: its class")
    for setting, values in settings_of(optimizer.param_groups).items():
        ledger.settings(values, f"{where}: {setting}")
    ledger.kept(tuple(_kept(parameter.grad) for _, parameter in known.names), where)
    parameters, whole = in_turn(known.names, known.steps, own.look_every)
    for name, parameter in parameters:
        held = {"the gradient": parameter.grad, **optimizer.state.get(parameter, {})}
        copies = ((f"{what} of {name}", kept) for what, kept in held.items() if isinstance(kept, Tensor))
        note(copies, where, known.steps, whole, among)


def _among(known: _Known) -> tuple[int, ...]:
    """The ranks of the mesh of its parameters."""
    parameter: Any = known.names[0][1]
    return ranks_of(parameter.device_mesh)


def _kept(gradient: Tensor | None) -> int:
    """See Ledger.kept."""
    if gradient is None:
        return 2
    before = hasattr(gradient, _SEEN)
    setattr(gradient, _SEEN, True)
    return int(before)


def bring_up_to_date(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` the parameters that have taken the place of its own, and lay out its states like them."""
    ours = {id(parameter) for module in TRACKED.modules for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for i, held in enumerate(group["params"]):
            new = group["params"][i] = current(held)  # in place: some optimizers keep the list
            if (state := optimizer.state.pop(held, None)) is not None:
                placed = id(new) in ours and isinstance(new, DTensor)
                optimizer.state[new] = _placed(state, new) if placed else state


def _placed(state: Any, parameter: DTensor) -> dict[str, Any]:
    """The states of an optimizer for `parameter`, placed like it if they have an entry for each of its elements."""
    return {
        key: placed_like(v, parameter) if isinstance(v, Tensor) and by_element(key, v.shape, parameter) else v
        for key, v in state.items()
    }


def by_element(key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether the state of an optimizer for `parameter` under `key`, a tensor of `shape`, has an entry for each of its
    elements. For a parameter with one number the shape does not tell."""
    return tuple(shape) == tuple(parameter.shape) and key not in _COUNTS
