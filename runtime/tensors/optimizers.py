"""Optimizers of the parameters that Partway lays out: what each does before it steps.

An optimizer holds parameters as objects, and nothing leads from a parameter to its optimizers. But PyTorch says when an
optimizer is about to step, which is the first time that it matters:

    of a parameter that was replaced    it gets the new one, with the states of the old one
    of one that was laid out anew       the states that are like it are laid out as it is, before they are used

That is seen to once after each such change, and when an optimizer has other parameters. And where there are other
ranks, each step tells their ledger what the optimizer's settings are, and what this rank has of some of the gradients
and states that others have, too (`replicas.py`).
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

_SEEN = "_partway_seen"  # an attribute of gradients that an optimizer has stepped with
_COUNTS = {"step", "mu_product", "mu", "eta"}  # what PyTorch's optimizers keep of a parameter as one number


def changed(module: nn.Module) -> None:
    """Parameters of `module` were replaced or laid out: every optimizer is looked at again when it steps."""
    TRACKED.changes += 1
    TRACKED.modules.add(module)
    if not TRACKED.listening:
        register_optimizer_step_pre_hook(_before_step)
        TRACKED.listening = True


@dataclass
class _Known:
    """What is known of an optimizer: `state`, for which it was looked at; the `names` of parameters of ours that it
    has; how many `steps` it has made since it was first seen."""

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
    """States that are split are in no other rank."""
    known = TRACKED.optimizers[optimizer]
    if known.names and comparing() is not None:
        ledger_of(_among(known)).settings("loaded", f"the load_state_dict of {type(optimizer).__name__}")


def _tell(own: Watch, optimizer: torch.optim.Optimizer, known: _Known) -> None:
    """Tell the ledger what the optimizer is about to step with."""
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
    """The ranks on whose mesh its parameters are."""
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
    """What an optimizer keeps for `parameter`, placed like it where it has an entry for each of its elements."""
    return {
        key: placed_like(v, parameter) if isinstance(v, Tensor) and by_element(key, v.shape, parameter) else v
        for key, v in state.items()
    }


def by_element(key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether what an optimizer keeps of `parameter` under `key`, a tensor of `shape`, has an entry for each of its
    elements. For a parameter that is one number the shape does not say it."""
    return tuple(shape) == tuple(parameter.shape) and key not in _COUNTS
