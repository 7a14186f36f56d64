"""The operators that call hooks of modules and tensors: Python that runs at each call, on whole values.

    partway::hooked(xs, key)              the tensors xs; in the backward their gradients pass through the hook `key`
    partway::hooked_backward(gs, key)     the gradients that the hook returns
    partway::observed(xs, read, key)      the tensors xs, after a call of the hook `key` with them and those in `read`

Hooks are collected while a function is captured (`capture/hooks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from ....strategy.errors import RuntimeStateError
from ...torch_internals import version_of
from .. import keyed
from ..registration import define


@dataclass(frozen=True, eq=False)
class Hook:
    """A user's hook: its name in messages, and a function that calls it with the tensors of its operator."""

    words: str
    call: Callable[[list[Tensor]], Sequence[Tensor] | None]
    attached: tuple[bool, ...] = ()  # whether each observed tensor needs a gradient


def number_of(hook: Hook) -> int:
    """A new number by which the operators find `hook` while it is referenced elsewhere."""
    number = next(keyed.NUMBERS)
    keyed.HOOK_OF[number] = hook
    return number


def _hook(key: int) -> Hook:
    hook: Hook = keyed.HOOK_OF[key]
    return hook


class _Attached(torch.autograd.Function):
    """The view that an observing hook gets of a tensor that needs a gradient: no gradient may come back from it."""

    @staticmethod
    def forward(ctx: Any, words: str, x: Tensor) -> Tensor:
        """`x` itself."""
        ctx.words = words
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise RuntimeStateError."""
        raise RuntimeStateError(
            f"a gradient reached a tensor that {ctx.words} has kept, and would not go on into the sharded function; "
            "let the hook keep it in a dict or an attribute (not by other means), or let the module return it"
        )


def _observed(xs: list[Tensor], read: list[Tensor], key: int) -> list[Tensor]:
    hook, every = _hook(key), [*xs, *read]
    versions = [version_of(x) for x in every]
    with torch.enable_grad():
        hook.call(
            [
                _Attached.apply(hook.words, x.detach().requires_grad_()) if needs else x.detach()  # type: ignore[no-untyped-call]
                for x, needs in zip(every, hook.attached, strict=True)
            ]
        )
    if versions != [version_of(x) for x in every]:
        raise RuntimeStateError(
            f"{hook.words} writes in place to its arguments, which would not reach the rest of the sharded "
            "function; let it return the new value"
        )
    return list(xs)


def _hooked_backward(gradients: list[Tensor], key: int) -> list[Tensor]:
    hook = _hook(key)
    returned = hook.call(list(gradients))
    if returned is None:
        return list(gradients)
    for new, old in zip(returned, gradients, strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise RuntimeStateError(
                f"{hook.words} returned a gradient of {new.dtype}{list(new.shape)} for one of "
                f"{old.dtype}{list(old.shape)}; return one of the same shape and dtype"
            )
    return [_like(new, old) for new, old in zip(returned, gradients, strict=True)]


def _like(new: Tensor, old: Tensor) -> Tensor:
    """`new` with the strides of `old`."""
    if new.stride() == old.stride():
        return new
    return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)


def _same(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return list(xs)


def _alike(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in xs]


def _keep_key(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.key = inputs[1]


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None]:
    return hooked_backward(list(gradients), ctx.key), None


def _keep_count(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.count = len(inputs[1])


def _observed_backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], list[None], None]:
    return list(gradients), [None] * ctx.count, None


# -- The operators

hooked = define("hooked(Tensor[] xs, int key) -> Tensor[]", _same, _alike, backward=_backward, keep=_keep_key)
hooked_backward = define("hooked_backward(Tensor[] gradients, int key) -> Tensor[]", _hooked_backward, _alike)
observed = define(
    "observed(Tensor[] xs, Tensor[] read, int key) -> Tensor[]",
    _observed,
    _alike,
    backward=_observed_backward,
    keep=_keep_count,
)
HOOKS = frozenset({hooked, hooked_backward, observed})
for _operator in (hooked, observed):  # their results may be unread
    has_side_effect(_operator)


def calls_hook(node: fx.Node) -> bool:
    """Whether a call runs a user's hook, which must run once for all ranks."""
    return node.target in (hooked_backward, observed)
