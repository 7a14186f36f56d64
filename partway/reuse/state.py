"""The state that a captured function reads beside its arguments, parameters and buffers.

Capture runs the Python code of a function once, and a plan holds as long as that code would do the same again. So
everything it may have read is compared before each call: attributes of modules and of the objects in them, globals,
closures, elements of lists and dicts. `reachable.py` finds these.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy as duplicate
from itertools import chain
from operator import attrgetter, getitem, is_
from typing import Any

from torch import Tensor, nn

from partway.propagation.capture.hooks import tracks
from partway.propagation.graph.structure import Same, name_of
from partway.propagation.torch_internals import buffers_in, module_hooks, modules_in, version_of
from partway.reuse.kinds import PLAIN, containers_in, fact, likeness
from partway.reuse.reachable import Reachable

_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_VALUES = "the values of a tensor from outside"
_GONE: Any = object()


class State:
    """The state on which the plan of `fn` depends beside a call and its tensors, at the time of creation.

    observers   the ids of hooks on which a plan does not depend, since they run at each call
    kept        the labels of values that the function itself replaces, compared by `likeness`
    read        the tensors whose values it read as numbers
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        observers: frozenset[int] = frozenset(),
        kept: frozenset[str] = frozenset(),
        read: tuple[Tensor, ...] = (),
    ) -> None:
        self.observers, self.kept, self.read = observers, kept, read
        self._versions = [*map(_version, read)]
        reached = self.reached = Reachable(fn, observers)
        items = [(store, key) for label, store, key in reached.items if label not in kept]
        self._own = [(store, key, likeness(store[key])) for label, store, key in reached.items if label in kept]
        self._stores, self._keys = [store for store, _ in items], [key for _, key in items]
        self._values = [*map(getitem, self._stores, self._keys)]
        self._reads = [(label, read, fact(read())) for label, read, draws in reached.reads if not draws]
        self._functions = reached.functions
        self._codes = [*chain.from_iterable(map(_CODE, reached.functions))]
        # a new name may hide one that is read: an instance's hides its class's, a class's its base's
        owned = [own.store for own in reached.owners if own.kind is not None or isinstance(own.where, type)]
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        hooks = [store for _, _, store in module_hooks(fn)]
        inside = [value for label, value in reached.containers if label not in kept and not isinstance(value, tuple)]
        stores = [store for _, m in modules for store in (modules_in(m), buffers_in(m))]
        # the elements of all containers in sequence, the length of each, and the empty ones
        self._views = [*chain.from_iterable(map(_views, inside)), *(store.values() for store in stores if store)]
        self._views += [store.keys() for store in hooks if store]
        self._elements = [*chain.from_iterable(self._views)]
        self._sized = [*self._views, *owned]
        self._sizes = [*map(len, self._sized)]
        self._empty = [store for store in (*stores, *hooks) if not store]
        self._environment = dict(_environment()) if reached.environment else None
        self.facts = self._facts(modules, reached)

    def _facts(self, modules: Sequence[tuple[str, nn.Module]], reached: Reachable) -> dict[str, Any]:
        facts: dict[str, Any] = {f"class of {path or 'the module'}": type(module) for path, module in modules}
        places = Counter[str]()  # the number of places with each label
        for path, module in modules:
            for name, buffer in buffers_in(module).items():
                place = f"buffer {path}.{name}" if path else f"buffer {name}"
                facts[place] = None if buffer is None else (tuple(buffer.shape), buffer.dtype, buffer.device)
        for i, (where, kind, hooks) in enumerate(module_hooks(modules[0][1] if modules else None)):
            known = tuple(Same(hook) for hook in hooks.values() if not tracks(hook))
            facts[f"{kind} hooks of {where or 'all modules'} ({i})"] = known
        if self._environment is not None:
            facts["os.environ"] = tuple(os.environ.items())
        for label, store, key in reached.items:
            fact_of = likeness if label in self.kept else fact
            facts[_numbered(label, places)] = fact_of(store[key])
        within = {id(one) for _, store, key in reached.items for one in containers_in(store[key])}
        for label, value in reached.containers:  # those in a partial or in another object that hides its contents
            if id(value) not in within and value:
                facts[_numbered(label, places)] = (likeness if label in self.kept else fact)(value)
        for label, _, value_before in self._reads:
            facts[_numbered(label, places)] = value_before
        facts[_VALUES] = _versioned(self.read, self._versions)
        for function in reached.functions:
            code, *defaults = _CODE(function)
            facts[_numbered(f"the code of {function.__qualname__}", places)] = Same(code), fact(defaults)
        return facts

    def holds(self) -> bool:
        """Whether nothing has changed. (False may be due to a change that does not count.)"""
        try:
            return (
                [*map(len, self._sized)] == self._sizes
                and not any(self._empty)
                and all(map(is_, chain.from_iterable(self._views), self._elements))
                and (self._environment is None or self._environment == _environment())
                and all(map(is_, chain.from_iterable(map(_CODE, self._functions)), self._codes))
                and (not self.read or [*map(_version, self.read)] == self._versions)
                and all(fact(read()) == before for _, read, before in self._reads)
                and (all(map(is_, map(getitem, self._stores, self._keys), self._values)) or self._are_like_before())
                and all(likeness(store[key]) == fact for store, key, fact in self._own)
            )
        except (AttributeError, KeyError, ValueError, RuntimeError):  # an object was removed
            return False

    def renewed(self, fn: Callable[..., Any]) -> State | None:
        """This state, or a new one with equal facts; None if something that counts has changed."""
        if self.holds():
            return self
        now = State(fn, self.observers, self.kept, self.read)
        return now if now.facts == self.facts else None

    def _are_like_before(self) -> bool:
        values = [*map(getitem, self._stores, self._keys)]
        for before, now in zip(self._values, values, strict=True):
            if before is not now and not (issubclass(type(now), PLAIN) and fact(before) == fact(now)):
                return False
        self._values = values
        return True

    def joined(self, other: State) -> State:
        """This state with the tensors that `other` read, in their versions."""
        joined = duplicate(self)
        more = [
            pair for pair in zip(other.read, other._versions, strict=True) if not any(pair[0] is t for t in self.read)
        ]
        joined.read = (*self.read, *(tensor for tensor, _ in more))
        joined._versions = [*self._versions, *(version for _, version in more)]
        joined.facts = self.facts | {_VALUES: _versioned(joined.read, joined._versions)}
        return joined

    def differences(self, other: State) -> list[str]:
        """The labels of the differences between two states."""
        labels = dict.fromkeys((*self.facts, *other.facts))
        return [label for label in labels if self.facts.get(label, _GONE) != other.facts.get(label, _GONE)]


def warn_of_unwatched(fn: Callable[..., Any], state: State) -> None:
    """Warn of values that `fn` can read and whose changes are not noticed."""
    if state.reached.unwatched:
        read = dict.fromkeys(f"{label}, a {kind}" for label, kind in state.reached.unwatched)
        warnings.warn(
            f"{name_of(fn)} reads {'; '.join(read)}, whose changes are not noticed: the values are taken once, when a "
            "call is planned, and what is written there is not written again; make it a tensor in a buffer, or an "
            "argument",
            stacklevel=6,
        )


def _versioned(tensors: Sequence[Tensor], versions: Sequence[int]) -> Any:
    return tuple((Same(tensor), version) for tensor, version in zip(tensors, versions, strict=True))


def _environment() -> Any:
    """The variables as os.environ stores them; decoding them would take longer than the rest of a guard."""
    return vars(os.environ).get("_data") or dict(os.environ)


def _version(tensor: Tensor) -> int:
    """The version of a tensor, by which PyTorch counts writes; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _numbered(label: str, places: Counter[str]) -> str:
    """`label`, with a number if it is not the first such label in `places`."""
    places[label] += 1
    return label if places[label] == 1 else f"{label} ({places[label]})"


def _views(container: Any) -> tuple[Any, ...]:
    return (dict.keys(container), dict.values(container)) if isinstance(container, dict) else (container,)
