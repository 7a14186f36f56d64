"""The operators that call hooks of modules and tensors: Python that runs at each call, on values that are whole.

    partway::hooked(xs, key)              the tensors xs; their gradients go through the hook `key` on the way back
    partway::hooked_backward(gs, key)     what that hook makes of the gradients
    partway::observed(xs, read, key)      the tensors xs, which the hook `key` has seen together with those in `read`

Which hooks there are is found while a function is captured (`capture/hooks.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ...strategy.errors import RuntimeStateError

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_LIBRARY.define("hooked(Tensor[] xs, int key) -> Tensor[]")
_LIBRARY.define("hooked_backward(Tensor[] gradients, int key) -> Tensor[]")
_LIBRARY.define("observed(Tensor[] xs, Tensor[] read, int key) -> Tensor[]")
hooked = torch.ops.partway.hooked.default
hooked_backward = torch.ops.partway.hooked_backward.default
observed = torch.ops.partway.observed.default
HOOKS = frozenset({hooked, hooked_backward, observed})
for _operator in (hooked, observed):  # nobody may need what they give
    fx.node.has_side_effect(_operator)


@dataclass(frozen=True, eq=False)
class Hook:
    """A person's hook: the words for it, and what calls it with the tensors of its operator."""

    words: str
    call: Callable[[list[Tensor]], Sequence[Tensor] | None]
    attached: tuple[bool, ...] = ()  # of what is observed: whether it needs a gradient


# A program names hooks by number; each lives as long as the graph that it is of.
_hooks: WeakValueDictionary[int, Hook] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(hook: Hook) -> int:
    """A new number by which the operators find `hook` as long as somebody holds it."""
    number = next(_numbers)
    _hooks[number] = hook
    return number


class _Attached(torch.autograd.Function):
    """What a hook that only looks is given of a tensor that needs a gradient: no gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, words: str, x: Tensor) -> Tensor:
        ctx.words = words
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeStateError(
            f"a gradient reached a tensor that {ctx.words} has kept, and would not go on into the sharded function; "
            "let the hook keep it in a dict or an attribute (not by other means), or let the module return it"
        )


def _observed(xs: list[Tensor], read: list[Tensor], key: int) -> list[Tensor]:
    hook, every = _hooks[key], [*xs, *read]
    versions = [x._version for x in every]
    with torch.enable_grad():
        hook.call([
            _Attached.apply(hook.words, x.detach().requires_grad_()) if needs else x.detach()  # type: ignore[no-untyped-call]
            for x, needs in zip(every, hook.attached, strict=True)
        ])  # fmt: skip
    if versions != [x._version for x in every]:
        raise RuntimeStateError(
            f"{hook.words} writes in place to what it is given, which would not reach the rest of the sharded "
            "function; let it return the new value"
        )
    return list(xs)


def _hooked_backward(gradients: list[Tensor], key: int) -> list[Tensor]:
    hook = _hooks[key]
    found = hook.call(list(gradients))
    if found is None:
        return list(gradients)
    for new, old in zip(found, gradients, strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise RuntimeStateError(
                f"{hook.words} returned a gradient of {new.dtype}{list(new.shape)} for one of "
                f"{old.dtype}{list(old.shape)}; return one of the same shape and dtype"
            )
    return [_like(new, old) for new, old in zip(found, gradients, strict=True)]


def _like(new: Tensor, old: Tensor) -> Tensor:
    """`new` with the strides of `old`."""
    if new.stride() == old.stride():
        return new
    return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)


def _same(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return list(xs)


def _alike(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in xs]


_LIBRARY.impl("hooked", _same, "CompositeExplicitAutograd")
_LIBRARY.impl("hooked_backward", _hooked_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("observed", _observed, "CompositeExplicitAutograd")
for _name in ("hooked", "hooked_backward", "observed"):
    torch.library.register_fake(f"partway::{_name}", _alike)


def _keep_key(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.key = inputs[1]


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None]:
    return hooked_backward(list(gradients), ctx.key), None


def _keep_count(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.count = len(inputs[1])


torch.library.register_autograd("partway::hooked", _backward, setup_context=_keep_key)
torch.library.register_autograd(
    "partway::observed",
    lambda ctx, gradients: (list(gradients), [None] * ctx.count, None),
    setup_context=_keep_count,
)


def calls_hook(node: fx.Node) -> bool:
    """Whether a call runs a person's hook: once for all ranks, and not again."""
    return node.target in (hooked_backward, observed)
