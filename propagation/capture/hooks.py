"""Hooks of modules and tensors inside a captured function: Python that runs at each call, on whole values.

A hook that only looks (it returns None) is called with the values of each call. One that returns something is part of
the function, and is captured with it. It sees the same as on one device: the operators that call hooks take their
operands whole, so that gradients are whole too, and in one process they run once for all ranks. A hook therefore costs
a gather where its tensors are split.

The hooks of the function itself run around its calls, as PyTorch runs those of any module; while it is captured they
rest, except for PyTorch's own (`weight_norm`, `spectral_norm`, `prune`), which compute parameters
and are captured.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...strategy.basics.blocks import afterwards, meanwhile, under_way
from ...strategy.errors import CaptureError, PartwayError, RuntimeStateError
from ..graph.graph import CalledHooks
from ..graph.nodes import operands
from ..graph.structure import flatten, name_of
from ..ops.python.hooked import HOOKS, Hook, hooked, number_of
from ..torch_internals import (
    global_hooks,
    has_old_backward_hooks,
    hook_flags,
    hooks_in,
    stores_of,
    tree_flatten,
    version_of,
)

KINDS = ("forward_pre", "forward", "backward_pre", "backward")
_OF_MODELS = ("torch", "transformers")  # their hooks are part of the models: they compute parameters, and fill results
_KEEPS = frozenset({"STORE_SUBSCR", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"})
_KEEPING = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "register_hook", "retain_grad", "setdefault", "update"}
)


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


# -- Hooks that do nothing for a while: those that compute parameters of a sharded module, outside a capture, and global
# module hooks, while planning calls its own modules


def awake() -> contextlib.AbstractContextManager[None]:
    """Wake all hooks inside the block, in which a function is captured together with them."""
    return meanwhile(hooking=True)


def rest_outside(store: dict[int, Any], rest: bool) -> None:
    """Let the hooks in `store` that compute parameters `rest` except during a capture; without `rest`, wake them. Each
    is replaced by one of another class with the same attributes."""
    for key, hook in store.items():
        if computes_parameters(hook) and hasattr(hook, "_rests") is not rest:
            kind: Any = type(hook)
            other = _resting(kind) if rest else kind.__bases__[0]
            store[key] = other.__new__(other)
            store[key].__dict__ = vars(hook)


@functools.lru_cache(maxsize=4096)
def _resting(kind: Any) -> Any:
    """A subclass of `kind` whose call does nothing except during a capture."""

    def call(self: Any, module: Any, arguments: Any) -> Any:
        return kind.__call__(self, module, arguments) if under_way().hooking else None

    body = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "_rests": True}
    return type(kind.__name__, (kind,), body)


@contextlib.contextmanager
def none_of_all_modules() -> Iterator[None]:
    """Remove the global module hooks inside the block, in which planning calls its own modules."""
    saved = [(store, OrderedDict(store)) for store in map(global_hooks, KINDS)]

    def restore() -> None:
        for store, held in saved:
            store.update(held)

    with afterwards(restore):
        for store, _ in saved:
            store.clear()
        yield


# -- Full backward hooks of a call of a module, as operators on the tensors that enter and leave it


class BackwardHooks:
    """The full backward (pre) hooks of one call of a module, called as torch.utils.hooks.BackwardHook calls them.

    inputs    the positions of the arguments that need a gradient
    results   the positions of the results that need one, of `count` in all
    """

    def __init__(self, path: str, module: Any, full: list[Any], first: list[Any], arguments: int) -> None:
        self._module, self._full, self._first, self._arguments = module, full, first, arguments
        names = ", ".join(name_of(hook) for hook in (*first, *full))
        self.words = f"the backward hook {names} of module {path!r}"
        self.inputs: list[int] = []
        self.results: list[int] = []
        self.count = 0
        self._gradients: tuple[Any, ...] | None = None

    def on_results(self, gradients: list[Tensor]) -> list[Tensor]:
        """Call the hooks as the gradients of the module's results arrive."""
        of_results = _packed(self.results, gradients, self.count)
        for hook in self._first:
            new = hook(self._module, of_results)
            of_results = of_results if new is None else self._checked(new, self.count)
        self._gradients = of_results
        if not self.inputs:
            for hook in self._full:
                hook(self._module, (None,) * self._arguments, of_results)
        return [of_results[i] for i in self.results]

    def on_inputs(self, gradients: list[Tensor]) -> list[Tensor]:
        """Call the hooks as the gradients of the module's arguments arrive."""
        of_inputs = _packed(self.inputs, gradients, self._arguments)
        of_results, self._gradients = self._gradients, None
        if of_results is not None:
            for hook in self._full:
                new = hook(self._module, of_inputs, of_results)
                of_inputs = of_inputs if new is None else self._checked(new, self._arguments)
        return [of_inputs[i] for i in self.inputs]

    def _checked(self, new: Any, count: int) -> tuple[Any, ...]:
        """The return value of a hook as a tuple of `count` gradients. Raises RuntimeStateError for another number."""
        gradients = new if isinstance(new, tuple) else tuple(new) if isinstance(new, list) else (new,)
        if len(gradients) != count:
            raise RuntimeStateError(f"{self.words} returned {len(gradients)} gradients in place of {count}")
        return gradients


def _packed(places: Sequence[int], values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """A tuple of length `count` with `values` at `places`, and None elsewhere."""
    packed: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        packed[place] = value
    return tuple(packed)


# -- Hooks as operators of the graph, and those that the function registers on tensors


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


# -- Hooks of the modules of the function


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
