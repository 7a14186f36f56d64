"""A stand-in for a parameter that a DTensor has replaced, for whoever still holds the old object.

An ordinary parameter cannot become a DTensor in place (the classes differ in their slots), so `distribute` puts a new
object into the module. The old one is still in optimizers, in a list for clip_grad_norm_, in a closure. It becomes a
stand-in: its operators run on the new one, and its `.grad` is that of the new one. An optimizer gets the new one at its
next step (`optimizers.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ...propagation.torch_internals import DisableTorchFunction, tree_map
from ...strategy.errors import RuntimeStateError
from .tracked import TRACKED

_BY = "_partway_replaced_by"


class Replaced(nn.Parameter):
    """A parameter that was replaced: any operator on it runs on the new one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(current, args), **tree_map(current, dict(kwargs or {})))

    def __getattr__(self, name: str) -> Any:  # attributes that a plain parameter lacks
        return getattr(current(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(current(self), name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)


def replace(old: nn.Parameter, new: nn.Parameter, name: str) -> None:
    """Make `old`, parameter `name` of a module, stand for `new`. A gradient that still reaches it, from an earlier
    computation, raises RuntimeStateError."""
    if old.requires_grad:
        old.register_hook(_refusal(name))
        old.requires_grad_(False)  # then asking autograd itself for the gradient of `old` is an error
    vars(old).clear()
    vars(old)[_BY] = new
    old.__class__ = Replaced
    TRACKED.replaced[old] = True


def current(value: Any) -> Any:
    """The current object for `value`: the new parameter if it is one that was replaced, else itself."""
    while type(value) is Replaced:
        value = vars(value)[_BY]
    return value


def let_go(parameters: Collection[Tensor]) -> None:
    """Free the storage of the stand-ins of these parameters, which no longer share it."""
    ids = {id(parameter) for parameter in parameters}
    with DisableTorchFunction():
        for old in list(TRACKED.replaced):
            if id(current(old)) in ids:
                object.__setattr__(old, "data", old.new_empty(0))  # its own


def carried(name: str, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A post-accumulate hook of the old parameter, for the new one. It may look up its argument among the old
    parameters, which are other objects; then the error says so."""

    def run(parameter: Tensor) -> None:
        try:
            hook(parameter)
        except KeyError as error:
            if error.args and error.args[0] is parameter:
                raise RuntimeStateError(
                    f"a hook of parameter {name} looks it up in a dict that was made before its module was sharded, "
                    "when it was another object; make the dict, and register the hook, after shard"
                ) from error
            raise

    return run


def _refusal(name: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise RuntimeStateError(
            f"a gradient reached what was parameter {name} before its module was sharded; run backward() of earlier "
            "results before that"
        )

    return refuse
