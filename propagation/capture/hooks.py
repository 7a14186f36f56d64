"""Hooks of modules and tensors inside a captured function: Python that runs at each call, on values that are whole.

A hook that only looks (it returns None) is called with what a call computes. One that returns something is part of the
function, and is captured with it. What it sees is what one device would see: the operators take their operands whole,
so that gradients are whole too, and in one process they run once for all ranks. So a hook costs a gather where its
tensors are split.

The hooks of the function itself run around its calls, as PyTorch runs those of any module; while it is captured they
rest, but for PyTorch's own (`weight_norm`, `spectral_norm`, `prune`), which compute parameters and are captured.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...strategy.afterwards import afterwards
from ...strategy.errors import CaptureError, PartwayError, RuntimeStateError
from ..graph.nodes import operands
from ..graph.structure import flatten, name_of
from ..ops.hooked import HOOKS, Hook, hooked, number_of
from ..torch_internals import global_hooks, hook_flags, tree_flatten

_meeting: ContextVar[bool] = ContextVar("meeting", default=False)  # whether a function with hooks is captured
_AHEAD = ("torch", "transformers")  # whose hooks are part of the models: they compute parameters, and fill results


# -- While a function is captured --------------------------------------------------------------------------------------


class Noted(Protocol):
    """What Python held at some moment."""

    def left(self) -> list[Any]:
        """What has been put somewhere since."""

    def restore(self) -> None:
        """Put everything back."""


def _keeps_gradients(noted: Noted) -> bool:
    """Whether tensors that need a gradient have been kept."""
    return any(tensor.requires_grad for value in noted.left() for tensor in flatten(value)[0])


class Hooks(TorchFunctionMode):
    """The hooks that were met in one capture.

    made        by number, for the graph to hold
    observers   the hooks of modules that only look, by id
    """

    def __init__(self, sandbox: Callable[[], Noted]) -> None:
        super().__init__()
        self.made: dict[int, Hook] = {}
        self.observers: dict[int, Any] = {}
        self._sandbox = sandbox
        self._tensors: list[tuple[int, RemovableHandle, dict[int, Any]]] = []

    def _number(
        self, words: str, call: Callable[[list[Tensor]], Sequence[Tensor] | None], attached: tuple[bool, ...] = ()
    ) -> int:
        hook = Hook(words, call, attached)
        number = number_of(hook)
        self.made[number] = hook
        return number

    # -- tensors

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
                found = each(gradient)
                gradient = gradient if found is None else found
            return [gradient]

        number = self._number(words, call)
        torch.ops.partway.hooked([x], number)
        self._tensors.append((number, handle, store))
        return handle

    def place(self, module: fx.GraphModule) -> None:
        """Let all that reads a tensor with a hook read what the hook's operator gives (in place). A hook that was
        removed meanwhile goes. Raises CaptureError for an observer of what nothing reads."""
        kept = {number for number, _, store in self._tensors if store}
        removed = {number for number, _, store in self._tensors if not store}
        noted = [n for n in module.graph.nodes if n.target is hooked and n.args[1] in kept | removed]
        for node in noted:  # what was registered first is next to the readers, and sees a gradient first
            (x,) = operands(node)
            if node.args[1] in kept:
                with module.graph.inserting_after(x):
                    moved = module.graph.call_function(hooked, ([x], node.args[1]))
                with module.graph.inserting_after(moved):
                    item = module.graph.call_function(operator.getitem, (moved, 0))
                moved.meta, item.meta = dict(node.meta), {**node.meta, "val": node.meta["val"][0]}
                x.replace_all_uses_with(item, functools.partial(_is_reader, {moved, *noted}))
        for node in noted:
            module.graph.erase_node(node)

    def check(self, module: fx.GraphModule) -> None:
        """Raise CaptureError for a hook whose tensors nothing reads, so that it would not run."""
        present = {node.args[-1] for node in module.graph.nodes if node.target in HOOKS}
        for number, hook in self.made.items():
            if number not in present and number not in {one for one, _, _ in self._tensors}:
                raise CaptureError(
                    f"{hook.words} is given no tensor that the rest of the function reads, and would not run; call it "
                    "outside the sharded function"
                )

    # -- modules

    @contextlib.contextmanager
    def of(self, fn: Any) -> Iterator[None]:
        """While `fn` is captured, its modules have hooks that are captured rather than called."""
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        stores = [store for _, m in modules for kind in _KINDS for store in _stores_of(m, kind)]
        shared = [global_hooks(kind) for kind in _KINDS]
        every = {id(store): store for store in (*stores, *shared)}.values()
        saved = [(store, OrderedDict(store)) for store in every]
        before = {kind: [hook for hook in global_hooks(kind).values() if not tracks(hook)] for kind in _KINDS}
        put: set[int] = set()

        def restore() -> None:
            for store, held in saved:
                added = {key: hook for key, hook in store.items() if key not in held and key not in put}
                if dict(store) != dict(held):
                    store.clear()
                    store.update(held)
                    store.update(added)

        def leave() -> None:
            restore()
            _meeting.set(False)

        with afterwards(leave):
            _meeting.set(True)
            for path, module in modules:
                self._prepare(path, module, module is fn, before, put)
            for store in shared:
                store.clear()
            yield

    def _prepare(self, path: str, module: nn.Module, root: bool, before: dict[str, list[Any]], put: set[int]) -> None:
        own = {kind: list(getattr(module, f"_{kind}_hooks").items()) for kind in _KINDS}
        of_all = {kind: [] if root else [(-1, hook) for hook in before[kind]] for kind in _KINDS}
        if not any(own.values()) and not any(of_all.values()):
            return
        if own["backward"] and module._is_full_backward_hook is False and not root:
            raise CaptureError(
                f"the hook {name_of(own['backward'][0][1])} of module {path!r} was registered with "
                "register_backward_hook, which sees the gradients of one operator; use register_full_backward_hook"
            )
        kwargs = {kind: set(hook_flags(module, kind)) for kind in ("forward_pre", "forward")}
        for kind in _KINDS:
            for store in _stores_of(module, kind):
                store.clear()

        def add(kind: str, wrapper: Any, with_kwargs: bool = True) -> None:
            handle = RemovableHandle(getattr(module, f"_{kind}_hooks"))
            put.add(handle.id)
            getattr(module, f"_{kind}_hooks")[handle.id] = wrapper
            if with_kwargs:
                hook_flags(module, kind)[handle.id] = True

        for kind, wrap in (("forward_pre", self._before), ("forward", self._after)):
            for key, hook in (*of_all[kind], *own[kind]):
                if computes_parameters(hook) if root else _is_part(hook):
                    add(kind, hook, key in kwargs[kind])
                elif not root:
                    words = f"the {kind.replace('_', ' ')} hook {name_of(hook)} of module {path!r}"
                    add(kind, functools.partial(wrap, hook, words, key in kwargs[kind]))
        full, first = ([hook for _, hook in (*of_all[kind], *own[kind])] for kind in ("backward", "backward_pre"))
        if not root and (full or first):
            pairs: list[_Backwards] = []
            add("forward_pre", functools.partial(self._entering, path, full, first, pairs))
            add("forward", functools.partial(self._leaving, pairs))

    def _before(self, hook: Any, words: str, with_kwargs: bool, module: Any, args: Any, kwargs: Any) -> Any:
        def call(arguments: Any) -> Any:
            given, named = arguments
            return hook(module, given, named) if with_kwargs else hook(module, given)

        found, new = self._met(hook, words, call, (args, kwargs), ())
        if new is None:
            return found
        if with_kwargs:
            return new
        return (new if isinstance(new, tuple) else (new,)), kwargs

    def _after(self, hook: Any, words: str, with_kwargs: bool, module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        def call(given: Any) -> Any:
            out, (arguments, named) = given
            return hook(module, arguments, named, out) if with_kwargs else hook(module, arguments, out)

        found, new = self._met(hook, words, lambda out, rest: call((out, rest)), result, (args, kwargs))
        return found if new is None else new

    def _met(self, hook: Any, words: str, call: Any, through: Any, rest: Any) -> tuple[Any, Any]:
        """What a hook of a module leaves of `through`, and what it returns: (None if it only looks) itself."""
        arguments = (through, rest) if rest != () else (through,)
        if not only_looks(hook):
            before = [(leaf, leaf._version) for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
            noted, hooks = self._sandbox(), len(self._tensors)
            try:
                new = call(*arguments)
            except PartwayError:
                raise
            except Exception:  # it looks at values, which there are none of yet
                new = None
            written = any(leaf._version != version for leaf, version in before)
            if new is not None or written or len(self._tensors) > hooks or _keeps_gradients(noted):
                return through, new
            noted.restore()
        self.observers[id(hook)] = hook
        xs, structure = flatten(through)
        read, others = flatten(rest)

        def look(tensors: list[Tensor]) -> None:
            values = list(tensors)
            given = (structure.build(values),)
            found = call(*given, *((others.build(values),) if rest != () else ()))
            if found is not None:
                raise RuntimeStateError(
                    f"{words} returned a {type(found).__name__}, and None when the call was planned, so that it was "
                    "taken for one that only looks; let it return a value always, or never"
                )

        number = self._number(words, look, tuple(x.requires_grad for x in (*xs, *read)))
        return structure.build(list(torch.ops.partway.observed(xs, read, number))), None

    def _entering(
        self, path: str, full: list[Any], first: list[Any], pairs: list[_Backwards], module: Any, args: Any, kwargs: Any
    ) -> Any:
        pair = _Backwards(path, module, full, first, len(args))
        pairs.append(pair)
        pair.inputs = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        if not pair.inputs or not torch.is_grad_enabled():
            return None
        new = list(args)
        number = self._number(pair.words, pair.on_inputs)
        for i, x in zip(pair.inputs, torch.ops.partway.hooked([args[i] for i in pair.inputs], number), strict=True):
            new[i] = x
        return tuple(new), kwargs

    def _leaving(self, pairs: list[_Backwards], module: Any, args: Any, kwargs: Any, result: Any) -> Any:
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
        number = self._number(pair.words, pair.on_results)
        for i, y in zip(
            pair.results, torch.ops.partway.hooked([results[i] for i in pair.results], number), strict=True
        ):
            results[i] = y
        if hasattr(result, "_fields"):  # a named tuple
            return type(result)(*results)
        return tuple(results) if isinstance(result, tuple) else results[0]


class _Backwards:
    """The full backward (pre) hooks of one call of a module, as torch.utils.hooks.BackwardHook calls them."""

    def __init__(self, path: str, module: Any, full: list[Any], first: list[Any], arguments: int) -> None:
        self._module, self._full, self._first, self._arguments = module, full, first, arguments
        names = ", ".join(name_of(hook) for hook in (*first, *full))
        self.words = f"the backward hook {names} of module {path!r}"
        self.inputs: list[int] = []
        self.results: list[int] = []
        self.count = 0
        self._gradients: tuple[Any, ...] | None = None

    def on_results(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of the module's results have come."""
        given = _packed(self.results, gradients, self.count)
        for hook in self._first:
            new = hook(self._module, given)
            given = given if new is None else self._checked(new, self.count)
        self._gradients = given
        if not self.inputs:
            for hook in self._full:
                hook(self._module, (None,) * self._arguments, given)
        return [given[i] for i in self.results]

    def on_inputs(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of its arguments have come."""
        found = _packed(self.inputs, gradients, self._arguments)
        given, self._gradients = self._gradients, None
        if given is not None:
            for hook in self._full:
                new = hook(self._module, found, given)
                found = found if new is None else self._checked(new, self._arguments)
        return [found[i] for i in self.inputs]

    def _checked(self, new: Any, count: int) -> tuple[Any, ...]:
        found = new if isinstance(new, tuple) else tuple(new) if isinstance(new, list) else (new,)
        if len(found) != count:
            raise RuntimeStateError(f"{self.words} returned {len(found)} gradients in place of {count}")
        return found


def _packed(places: Sequence[int], values: Sequence[Any], count: int) -> tuple[Any, ...]:
    found: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return tuple(found)


def _is_reader(others: set[fx.Node], user: fx.Node) -> bool:
    return user not in others


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def _stores_of(module: nn.Module, kind: str) -> list[dict[int, Any]]:
    found = [getattr(module, f"_{kind}_hooks")]
    return [*found, hook_flags(module, kind)] if kind in ("forward_pre", "forward") else found


def _package(hook: Any) -> str:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def _is_part(hook: Any) -> bool:
    """Whether a hook belongs to the library that the model is written with."""
    return _package(hook) in _AHEAD or computes_parameters(hook)


def tracks(hook: Any) -> bool:
    """Whether a hook is one by which PyTorch's counters and profilers follow which module runs: it is no part of a
    program, and what it would be told of a module inside does not happen there."""
    return getattr(hook, "__module__", "") == "torch.utils.module_tracker"


def computes_parameters(hook: Any) -> bool:
    """Whether a hook is one of torch.nn.utils, which compute a parameter of its module before the forward."""
    return any(cls.__module__.startswith("torch.nn.utils.") for cls in type(hook).__mro__)


def rest_outside(store: dict[int, Any], rest: bool) -> None:
    """Let those hooks in `store` that compute parameters `rest` unless they are captured, as they are with the function
    that they are on; or no longer."""
    for hook in store.values():
        if computes_parameters(hook) and hasattr(hook, "_rests") is not rest:
            kind: Any = type(hook)
            hook.__class__ = _resting(kind) if rest else kind.__bases__[0]


@functools.cache
def _resting(kind: Any) -> Any:
    """`kind` with a call that does nothing but while it is captured."""

    def call(self: Any, module: Any, arguments: Any) -> Any:
        return kind.__call__(self, module, arguments) if _meeting.get() else None

    body = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "_rests": True}
    return type(kind.__name__, (kind,), body)


@contextlib.contextmanager
def none_of_all_modules() -> Iterator[None]:
    """Meanwhile there are no hooks of all modules: planning calls modules of its own."""
    saved = [(store, OrderedDict(store)) for store in map(global_hooks, _KINDS)]

    def restore() -> None:
        for store, held in saved:
            store.update(held)

    with afterwards(restore):
        for store, _ in saved:
            store.clear()
        yield


_KEEPS = frozenset({"STORE_SUBSCR", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"})
_KEEPING = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "register_hook", "retain_grad", "setdefault", "update"}
)


def only_looks(hook: Any) -> bool:
    """Whether the code of a hook shows that it returns None, keeps nothing and calls no method that writes in place."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or any(name in _KEEPING or (name.endswith("_") and name[0] != "_") for name in code.co_names):
        return False
    steps = list(dis.get_instructions(code))
    for before, step in itertools.pairwise(steps):
        nothing = before.opname == "LOAD_CONST" and before.argval is None
        if step.opname in _KEEPS or (step.opname == "RETURN_VALUE" and not nothing):
            return False
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
    return True
