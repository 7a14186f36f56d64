"""The hooks of the modules of a captured function.

A hook that only looks (it returns None) becomes an operator that calls it with the values of each call. A hook that
returns something is part of the function, and is captured with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....strategy.basics.afterwards import afterwards
from ....strategy.errors import CaptureError, PartwayError, RuntimeStateError
from ...graph.structure import flatten, name_of
from ...torch_internals import global_hooks, has_old_backward_hooks, hook_flags, hooks_in, tree_flatten, version_of
from .backward_hooks import BackwardHooks
from .hook_kinds import KINDS, computes_parameters, is_part, only_looks, stores_of, tracks
from .hooks import Hooks
from .resting_hooks import awake


class Noted(Protocol):
    """A record of what Python held at some moment."""

    def left(self) -> list[Any]:
        """The values that were stored somewhere since."""
        ...

    def restore(self) -> None:
        """Put everything back."""


def _keeps_gradients(noted: Noted) -> bool:
    """Whether tensors that need a gradient have been kept."""
    return any(tensor.requires_grad for value in noted.left() for tensor in flatten(value)[0])


class ModuleHooks:
    """Captures the hooks of a function's modules; `hooks` collects them, and `noted` records what Python holds."""

    def __init__(self, hooks: Hooks, noted: Callable[[], Noted]) -> None:
        self._hooks, self._noted = hooks, noted

    @contextlib.contextmanager
    def of(self, fn: Any) -> Iterator[None]:
        """Inside the block, replace the hooks of the modules of `fn` by ones that are captured rather than called."""
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        stores = [store for _, m in modules for kind in KINDS for store in stores_of(m, kind)]
        shared = [global_hooks(kind) for kind in KINDS]
        every = {id(store): store for store in (*stores, *shared)}.values()
        saved = [(store, OrderedDict(store)) for store in every]
        before = {kind: [hook for hook in global_hooks(kind).values() if not tracks(hook)] for kind in KINDS}
        put: set[int] = set()

        def restore() -> None:
            for store, held in saved:
                added = {key: hook for key, hook in store.items() if key not in held and key not in put}
                if dict(store) != dict(held):
                    store.clear()
                    store.update(held)
                    store.update(added)

        with awake(), afterwards(restore):
            for path, module in modules:
                self._prepare(path, module, module is fn, before, put)
            for store in shared:
                store.clear()
            yield

    def _prepare(self, path: str, module: nn.Module, root: bool, before: dict[str, list[Any]], put: set[int]) -> None:
        """Replace the hooks of a module. `before`: the global hooks, of all modules; `put` collects the ids of the new
        hooks."""
        own = {kind: list(hooks_in(module, kind).items()) for kind in KINDS}
        of_all = {kind: [] if root else [(-1, hook) for hook in before[kind]] for kind in KINDS}
        if not any(own.values()) and not any(of_all.values()):
            return
        if own["backward"] and has_old_backward_hooks(module) and not root:
            raise CaptureError(
                f"the hook {name_of(own['backward'][0][1])} of module {path!r} was registered with "
                "register_backward_hook, which sees the gradients of one operator; use register_full_backward_hook"
            )
        kwargs = {kind: set(hook_flags(module, kind)) for kind in ("forward_pre", "forward")}
        for kind in KINDS:
            for store in stores_of(module, kind):
                store.clear()

        def add(kind: str, wrapper: Any, with_kwargs: bool = True) -> None:
            handle = RemovableHandle(hooks_in(module, kind))
            put.add(handle.id)
            hooks_in(module, kind)[handle.id] = wrapper
            if with_kwargs:
                hook_flags(module, kind)[handle.id] = True

        for kind, wrap in (("forward_pre", self._before), ("forward", self._after)):
            for key, hook in (*of_all[kind], *own[kind]):
                if computes_parameters(hook) if root else is_part(hook):
                    add(kind, hook, key in kwargs[kind])
                elif not root:
                    words = f"the {kind.replace('_', ' ')} hook {name_of(hook)} of module {path!r}"
                    add(kind, functools.partial(wrap, hook, words, key in kwargs[kind]))
        full, first = ([hook for _, hook in (*of_all[kind], *own[kind])] for kind in ("backward", "backward_pre"))
        if not root and (full or first):
            pairs: list[BackwardHooks] = []
            add("forward_pre", functools.partial(self._entering, path, full, first, pairs))
            add("forward", functools.partial(self._leaving, pairs))

    def _before(self, hook: Any, words: str, with_kwargs: bool, module: Any, args: Any, kwargs: Any) -> Any:
        """The arguments after a forward pre-hook."""

        def call(arguments: Any) -> Any:
            positional, named = arguments
            return hook(module, positional, named) if with_kwargs else hook(module, positional)

        observed, new = self._met(hook, words, call, (args, kwargs), ())
        if new is None:
            return observed
        if with_kwargs:
            return new
        return (new if isinstance(new, tuple) else (new,)), kwargs

    def _after(self, hook: Any, words: str, with_kwargs: bool, module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The result after a forward hook."""

        def call(out: Any, inputs: Any) -> Any:
            arguments, named = inputs
            return hook(module, arguments, named, out) if with_kwargs else hook(module, arguments, out)

        observed, new = self._met(hook, words, call, result, (args, kwargs))
        return observed if new is None else new

    def _met(self, hook: Any, words: str, call: Any, through: Any, rest: Any) -> tuple[Any, Any]:
        """`through` after a hook of a module, and the hook's return value (None if it only looks). `rest`: the hook's
        other arguments."""
        arguments = (through, rest) if rest != () else (through,)
        if not only_looks(hook):
            before = [(leaf, version_of(leaf)) for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
            noted, hooks = self._noted(), self._hooks.on_tensors
            try:
                new = call(*arguments)
            except PartwayError:
                raise
            except Exception:  # it looks at values, which fake tensors do not have
                new = None
            written = any(version_of(leaf) != version for leaf, version in before)
            if new is not None or written or self._hooks.on_tensors > hooks or _keeps_gradients(noted):
                return through, new
            noted.restore()
        self._hooks.observers[id(hook)] = hook
        xs, structure = flatten(through)
        read, others = flatten(rest)

        def look(tensors: list[Tensor]) -> None:
            values = list(tensors)
            seen = [structure.build(values)] if rest == () else [structure.build(values), others.build(values)]
            answer = call(*seen)
            if answer is not None:
                raise RuntimeStateError(
                    f"{words} returned a {type(answer).__name__}, and None when the call was planned, so that it was "
                    "taken for one that only looks; let it return a value always, or never"
                )

        number = self._hooks.number(words, look, tuple(x.requires_grad for x in (*xs, *read)))
        return structure.build(list(torch.ops.partway.observed(xs, read, number))), None

    def _entering(
        self,
        path: str,
        full: list[Any],
        first: list[Any],
        pairs: list[BackwardHooks],
        module: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        pair = BackwardHooks(path, module, full, first, len(args))
        pairs.append(pair)
        pair.inputs = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        if not pair.inputs or not torch.is_grad_enabled():
            return None
        new = list(args)
        number = self._hooks.number(pair.words, pair.on_inputs)
        for i, x in zip(pair.inputs, torch.ops.partway.hooked([args[i] for i in pair.inputs], number), strict=True):
            new[i] = x
        return tuple(new), kwargs

    def _leaving(self, pairs: list[BackwardHooks], module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        pair = pairs.pop()
        if not isinstance(result, Tensor | tuple):
            raise CaptureError(
                f"{pair.words} is never called by PyTorch, as the module returns a {type(result).__name__}; let it "
                "return a tensor or a tuple of tensors"
            )
        results = list(result) if isinstance(result, tuple) else [result]
        pair.results, pair.count = (
            [i for i, y in enumerate(results) if isinstance(y, Tensor) and y.requires_grad],
            len(results),
        )
        if not pair.results or not torch.is_grad_enabled():
            return None
        number = self._hooks.number(pair.words, pair.on_results)
        for i, y in zip(
            pair.results, torch.ops.partway.hooked([results[i] for i in pair.results], number), strict=True
        ):
            results[i] = y
        if hasattr(result, "_fields"):  # a named tuple
            return type(result)(*results)
        return tuple(results) if isinstance(result, tuple) else results[0]
