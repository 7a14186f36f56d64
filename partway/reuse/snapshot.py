"""Snapshots of everything that a function may write, to find later changes and to undo them."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from partway.propagation.torch_internals import buffers_in, modules_in, parameters_in
from partway.reuse.facts import elements_of, fact
from partway.reuse.reachable import OWN_STORES, Reachable

_GONE: Any = object()  # stands for a value where there is none


@dataclass(frozen=True)
class Write:
    """A function's write of `value` to the place `label`; `put` writes a value there."""

    label: str
    put: Callable[[Any], None]
    value: Any


class Snapshot:
    """The values of all places that a function may write, at the time of creation."""

    def __init__(self, fn: Callable[..., Any], reachable: Reachable) -> None:
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        dicts: dict[int, tuple[str, Any]] = {
            id(owner.store): (owner.label, owner.store) for owner in reachable.owners if owner.kind is not None
        }
        dicts |= {id(vars(module)): (f"{path}." if path else "", vars(module)) for path, module in modules}
        self._copies = [
            (label, store, {name: value for name, value in store.items() if name not in OWN_STORES})
            for label, store in dicts.values()
        ]
        self._buffers = [(path, buffers_in(m), dict(buffers_in(m))) for path, m in modules]
        self._fixed = [
            (kind, path, store, dict(store))
            for path, m in modules
            for kind, store in (("parameter", parameters_in(m)), ("module", modules_in(m)))
        ]
        self._statics = [
            (owner.label, owner.static, _own_attributes(owner.static))
            for owner in reachable.owners
            if owner.static is not None
        ]
        self._getters = [(label, one, name, getattr(one, name)) for label, one, name in reachable.getters]
        self._globals = [(label, where, name, where.get(name, _GONE)) for label, where, name in reachable.globals]
        kept = [(f"{label}{name}", v) for label, _, copy in self._copies for name, v in copy.items()]
        every = {id(value): (label, value) for label, value in (*kept, *reachable.containers) if _is_mutable(value)}
        self._containers = [(label, value, _copy(value)) for label, value in every.values()]
        self._reads = [(label, read, draws, fact(read())) for label, read, draws in reachable.reads]
        self.old: dict[str, Any] = dict(kept) | {label: old for label, _, _, old in (*self._getters, *self._globals)}
        self.old |= {label: copy for label, _, copy in self._containers}

    def parameters(self) -> list[Any]:
        """The parameters, in the order of the modules."""
        return [one for kind, _, _, copy in self._fixed if kind == "parameter" for one in copy.values()]

    def writes(self, stand_ins: Mapping[int, Any] = types.MappingProxyType({})) -> Iterator[Write]:
        """The places that hold another object now. `stand_ins`: by the id of a stand-in, its parameter. A list of
        stand-ins in place of one of their parameters, such as an nn.LSTM makes of its weights, is no change."""
        known = {id(container) for _, container, _ in self._containers}

        def kept(value: Any) -> Any:
            """Mark a container of the snapshot, which stays the same object even in another place."""
            return _Kept(value) if id(value) in known else value

        for label, store, name, old in self._places():
            now = store.get(name, _GONE)
            if now is not old and not _lists_same(old, now, stand_ins):
                yield Write(label, functools.partial(_put, store, name), kept(now))
        for label, one, copy in self._statics:
            for name, _, now in _changed(copy, _own_attributes(one)):
                yield Write(f"{label}{name}", functools.partial(_set, one, name), kept(now))
        for label, one, name, old in self._getters:
            if getattr(one, name) is not old:
                yield Write(label, functools.partial(_fill, one, name), kept(getattr(one, name)))
        for label, container, copy in self._containers:
            if not _holds_same(container, copy):
                yield Write(label, functools.partial(_refill, container), _copy(container, kept))

    def _places(self) -> Iterator[tuple[str, MutableMapping[str, Any], str, Any]]:
        """The places in dicts: label, dict, key and old value."""
        for label, store, copy in self._copies:
            for name in dict.fromkeys((*copy, *(n for n in store if n not in OWN_STORES))):
                yield f"{label}{name}", store, name, copy.get(name, _GONE)
        for path, store, copy in self._buffers:
            for name in dict.fromkeys((*copy, *store)):
                yield f"{path}.{name}" if path else name, store, name, copy.get(name, _GONE)
        yield from self._globals

    def replaced(self) -> list[str]:
        """The parameters, and modules with tensors, that were replaced, removed or added."""
        return [
            f"{kind} {path}.{name}" if path else f"{kind} {name}"
            for kind, path, store, copy in self._fixed
            for name, old, now in _changed(copy, store)
            if _has_tensors(now) or _has_tensors(old)
        ]

    def changed(self) -> Iterator[tuple[str, bool]]:
        """The labels of changed values that no call can write, and whether random numbers were drawn from them."""
        for label, read, draws, before in self._reads:
            if fact(read()) != before:
                yield label, draws

    def left(self) -> list[Any]:
        """The values written since."""
        return [write.value for write in self.writes()]

    def restore(self) -> None:
        """Restore all values."""
        for _, store, copy in self._copies:
            for name in [name for name in store if name not in OWN_STORES and name not in copy]:
                del store[name]
            store.update(copy)
        for _, store, copy in self._buffers:
            _refill(store, copy)
        for _, _, store, copy in self._fixed:
            _refill(store, copy)
        for _, one, copy in self._statics:
            for name, old, _ in _changed(copy, _own_attributes(one)):
                _set(one, name, old)
        for _, one, name, old in self._getters:
            if getattr(one, name) is not old:
                _fill(one, name, old)
        for _, where, name, old in self._globals:
            _put(where, name, old)
        for _, container, copy in self._containers:
            _refill(container, copy)


def _has_tensors(value: Any) -> bool:
    """Whether `value` is a tensor, or a module with parameters or buffers."""
    return issubclass(type(value), Tensor) or (
        issubclass(type(value), nn.Module) and any(True for _ in chain(value.parameters(), value.buffers()))
    )


def _is_mutable(value: Any) -> bool:
    return issubclass(type(value), list | dict | set | deque)


def _holds_same(one: Any, other: Any) -> bool:
    """Whether two containers of one type hold the same objects."""
    if isinstance(one, set):
        return set(map(id, one)) == set(map(id, other))
    return len(one) == len(other) and all(a is b for a, b in zip(elements_of(one), elements_of(other), strict=True))


def _lists_same(old: Any, now: Any, stand_ins: Mapping[int, Any]) -> bool:
    """Whether `now` lists the stand-ins of the parameters that `old` lists, or weak references to them."""
    if not type(old) is type(now) is list or not old or len(old) != len(now):
        return False

    def referred(one: Any) -> tuple[Any, bool]:
        weak = isinstance(one, weakref.ref)
        return one() if weak else one, weak

    pairs = zip(map(referred, old), map(referred, now), strict=True)
    return all(a == b and stand_ins.get(id(other), _GONE) is one for (one, a), (other, b) in pairs)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The differences: name, old value and new value (_GONE if there is none)."""
    pairs = ((name, before.get(name, _GONE), now.get(name, _GONE)) for name in dict.fromkeys((*before, *now)))
    return [(name, old, new) for name, old, new in pairs if old is not new]


def _own_attributes(static: Any) -> dict[str, Any]:
    """The attributes of a class or a Python module, without Python's own."""
    return {name: value for name, value in vars(static).items() if not name.startswith("__")}


def _put(store: MutableMapping[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        store.pop(name, None)
    else:
        store[name] = _unwrapped(value)


def _fill(one: Any, name: str, value: Any) -> None:
    """Put `value` into a slot or a cell, also of a frozen object, whose code has changed it in the same way."""
    object.__setattr__(one, name, _unwrapped(value))


def _set(one: Any, name: str, value: Any) -> None:
    if value is not _GONE:
        setattr(one, name, _unwrapped(value))
    elif name in vars(one):
        delattr(one, name)


class _Kept:
    """Marks a container of the snapshot, which stays the same object."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def _unwrapped(value: Any) -> Any:
    return value.held if isinstance(value, _Kept) else value


def _refill(container: Any, content: Any) -> None:
    """Give a list, dict, set or deque the elements of `content`."""
    if _holds_same(container, content):
        return
    base = _base(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, value in content.items():
            base.__setitem__(container, key, _unwrapped(value))
    elif isinstance(container, set):
        base.update(container, content)
    else:
        base.extend(container, map(_unwrapped, content))


def _base(container: Any) -> Any:
    """The built-in type of a container; the methods of a subclass may do more."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _copy(container: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """A container of the built-in type with the same elements, each changed by `change`."""
    if isinstance(container, dict):
        return {key: change(value) for key, value in dict.items(container)}
    return _base(container)(container if isinstance(container, set) else map(change, container))
