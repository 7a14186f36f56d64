"""Hooks of modules and tensors inside a captured function: Python that runs at each call, on whole values.

A hook that only looks (it returns None) is called with the values of each call. One that returns something is part of
the function, and is captured with it. It sees the same as on one device: the operators that call hooks take their
operands whole, so that gradients are whole too, and in one process they run once for all ranks. A hook therefore costs
a gather where its tensors are split.

The hooks of the function itself run around its calls, as PyTorch runs those of any module; while it is captured they
rest (resting_hooks.py), except for PyTorch's own (`weight_norm`, `spectral_norm`, `prune`), which compute parameters
and are captured.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ....strategy.errors import CaptureError
from ...graph.graph import CalledHooks
from ...graph.nodes import operands
from ...graph.structure import name_of
from ...ops.python.hooked import HOOKS, Hook, hooked, number_of
from ...torch_internals import tree_flatten


class Hooks(TorchFunctionMode):
    """The hooks that one capture meets; as a mode, it sees those that the function registers on tensors.

    by_number   the hooks that operators call
    observers   the hooks of modules that only look, by id
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_number: dict[int, Hook] = {}
        self.observers: dict[int, Any] = {}
        self._tensors: list[tuple[int, RemovableHandle, dict[int, Any]]] = []

    def called(self) -> CalledHooks:
        """The hooks that the graph calls."""
        return CalledHooks(self.by_number, tuple(self.observers.values()))

    @property
    def on_tensors(self) -> int:
        """The number of hooks on tensors so far."""
        return len(self._tensors)

    def number(
        self, words: str, call: Callable[[list[Tensor]], Sequence[Tensor] | None], attached: tuple[bool, ...] = ()
    ) -> int:
        """Add a hook, and return the number by which operators call it. `words`: its name in messages; `attached`: for
        each tensor that it observes, whether the tensor needs a gradient."""
        hook = Hook(words, call, attached)
        number = number_of(hook)
        self.by_number[number] = hook
        return number

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook and args[0].requires_grad:
            return self._on_tensor(args[0], args[1] if len(args) > 1 else (kwargs or {})["hook"])
        if func is Tensor.retain_grad and not args[0].is_leaf:
            raise CaptureError(
                "retain_grad() inside a sharded function keeps no gradient; read it in a hook: "
                "h.register_hook(lambda gradient: ...)"
            )
        if func is Tensor.register_post_accumulate_grad_hook:
            raise CaptureError(
                "register_post_accumulate_grad_hook inside a sharded function adds a hook in every call; call it once, "
                "outside"
            )
        return func(*args, **(kwargs or {}))

    def _on_tensor(self, x: Tensor, hook: Any) -> RemovableHandle:
        words = f"the hook {name_of(hook)} of a tensor"
        if isinstance(x, nn.Parameter):
            raise CaptureError(f"{words}, a parameter, is registered in every call; register it once, outside")
        held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        held += [*(getattr(hook, "__defaults__", None) or ()), *getattr(hook, "args", ())]
        if any(isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter) for leaf in tree_flatten(held)[0]):
            raise CaptureError(
                f"{words} uses other tensors of the call that registers it, which it would not see in later ones; "
                "compute with them in the forward, or write a torch.autograd.Function"
            )
        store: OrderedDict[int, Any] = OrderedDict()
        handle = RemovableHandle(store)
        store[handle.id] = hook

        def call(gradients: list[Tensor]) -> list[Tensor] | None:
            (gradient,) = gradients
            for each in store.values():
                new = each(gradient)
                gradient = gradient if new is None else new
            return [gradient]

        number = self.number(words, call)
        torch.ops.partway.hooked([x], number)
        self._tensors.append((number, handle, store))
        return handle

    def place(self, module: fx.GraphModule) -> None:
        """Let all readers of a tensor with a hook read the result of the hook's operator instead (in place). Hooks that
        the function removed are dropped."""
        kept = {number for number, _, store in self._tensors if store}
        removed = {number for number, _, store in self._tensors if not store}
        calls = [n for n in module.graph.nodes if n.target is hooked and n.args[1] in kept | removed]
        for node in calls:  # the hook registered first is next to the readers, and sees a gradient first
            (x,) = operands(node)
            if node.args[1] in kept:
                with module.graph.inserting_after(x):
                    moved = module.graph.call_function(hooked, ([x], node.args[1]))
                with module.graph.inserting_after(moved):
                    item = module.graph.call_function(operator.getitem, (moved, 0))
                moved.meta, item.meta = dict(node.meta), {**node.meta, "val": node.meta["val"][0]}
                x.replace_all_uses_with(item, functools.partial(_is_reader, {moved, *calls}))
        for node in calls:
            module.graph.erase_node(node)

    def check(self, module: fx.GraphModule) -> None:
        """Raise CaptureError for a hook of a module whose tensors nothing reads: it would not run."""
        present = {node.args[-1] for node in module.graph.nodes if node.target in HOOKS}
        for number, hook in self.by_number.items():
            if number not in present and number not in {key for key, _, _ in self._tensors}:
                raise CaptureError(
                    f"{hook.words} is given no tensor that the rest of the function reads, and would not run; call it "
                    "outside the sharded function"
                )


def _is_reader(hooks: set[fx.Node], user: fx.Node) -> bool:
    """Whether `user` reads a tensor, and is not a call of a hook."""
    return user not in hooks
