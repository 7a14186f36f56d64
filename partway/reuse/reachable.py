"""Everything that the code of a function can reach by the names in it.

Reads are not intercepted. The names that a function reads are found in its code, and every reachable object with one of
them is watched: rather too many than too few, since watching costs only a comparison of identities.

Any object may be reachable, even one that raises an error at an attribute access, or at `isinstance` (which reads
`__class__`). So unknown objects are examined by `type`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

from partway.propagation.capture.hooks import tracks
from partway.propagation.graph.structure import name_of, state_of
from partway.propagation.torch_internals import COMPILED_CALL, module_hooks
from partway.requests.request import ATTRIBUTE
from partway.reuse.code_names import Asks, Names, names_in
from partway.reuse.kinds import CONTAINERS, OPEN, PLAIN, WHOLE, kind_of, unwatched
from partway.reuse.libraries import is_closed, is_closed_type

# torch's own attributes, which the guard watches, and ours
OWN_STORES = frozenset(vars(nn.Module())) | {COMPILED_CALL, ATTRIBUTE}
_ALWAYS = frozenset({"forward"})  # runs although no code names it
_CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
_NO_STORE: Mapping[str, Any] = {}


def _own_store(value: Any) -> Mapping[str, Any]:
    """The instance attributes of an object."""
    try:
        store = object.__getattribute__(value, "__dict__")
    except Exception:  # a dead proxy may raise anything
        return _NO_STORE
    return store if isinstance(store, dict) else _NO_STORE


class Attribute:
    """An attribute of an object, such as a slot or the contents of a cell, as the only item of a mapping."""

    def __init__(self, of: Any, name: str) -> None:
        self._of, self._name = of, name

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self._of, name)  # without a user's __getattr__

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._of, name, value)  # also of a frozen object, whose code has set it in the same way

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Its name and value."""
        return ((self._name, self[self._name]),)


@dataclass
class Owner:
    """An object with attributes.

    label    the prefix of its attributes' names in messages
    store    the dict of the attributes
    every    whether all of them count, or only those that code names
    kind     its type; None for a class or a Python module
    where    that class, or the module's dict, unless it is a library's
    seen     the attributes that were added
    """

    label: str
    store: Mapping[str, Any]
    every: bool
    kind: type | None
    where: Any = None
    seen: set[str] = field(default_factory=set)


class Reachable:
    """Everything that the code of a function can reach by the names in it."""

    def __init__(self, fn: Callable[..., Any], observers: frozenset[int]) -> None:
        self.attributes = set(_ALWAYS)
        self.owners: list[Owner] = []
        self.items: list[tuple[str, Any, Any]] = []  # a label, a store and a key
        self.globals: list[tuple[str, MutableMapping[str, Any], str]] = []  # those that code writes
        self.containers: list[tuple[str, Any]] = []
        self.environment = False  # whether code reads variables of the environment
        self.asks = Asks()
        self._any_attribute = False  # whether code computes the names of attributes
        self._creates = False  # whether code creates objects of classes that it does not name
        self._constructors: list[tuple[str, Any]] = []  # of classes that were reached through their objects
        self.reads: list[tuple[str, Callable[[], Any], bool]] = []  # a label, a reader, whether it is a generator
        self.functions: list[FunctionType] = []  # those whose code may change
        self.unwatched: list[tuple[str, str]] = []
        self._waiting = deque[tuple[Any, str, bool]]()  # reached, and not inspected yet
        self._known: set[int] = set()
        self._types: set[int] = set()
        self._global: set[tuple[int, str]] = set()
        self._kept: list[Any] = []  # keeps known objects alive, so that their ids stay unique
        if isinstance(fn, nn.Module):
            for path, module in fn.named_modules():
                self.reach(module, f"{path}." if path else "")
            for name, tensor in state_of(fn).items():  # attributes that users have set on tensors
                self.owners.append(Owner(f"{name}.", vars(tensor), False, type(tensor)))
            for _, _, store in module_hooks(fn):
                for hook in store.values():
                    if id(hook) not in observers and not tracks(hook):
                        self.reach(hook, f"hook {name_of(hook)}.", every=True)
        else:
            self.reach(fn, "")
        self._follow()

    def reach(self, value: Any, label: str, every: bool = False) -> None:
        """Queue `value` for inspection; the labels of its attributes begin with `label`."""
        if issubclass(type(value), (*PLAIN, Tensor)) or id(value) in self._known:
            return
        self._known.add(id(value))
        self._kept.append(value)
        self._waiting.append((value, label, every))

    def _look_into(self, value: Any, label: str, every: bool) -> None:
        kind, engine, known = type(value), _own_store(value).get("_engine"), kind_of(value)
        if word := unwatched(value):
            self.unwatched.append((label.rstrip("."), word))
        if engine is not None and is_closed_type(type(engine)):  # a sharded function, or a manual function
            self.reach(engine.fn, label)
        elif known is not None:
            self.attributes |= {*known.names(value)}
            self._creates |= issubclass(kind, classmethod)
            if known.read is not None:
                self.reads.append((label.rstrip("."), functools.partial(known.read, value), known.draws))
            self._reach_all(known.inside(value), label)
            if not is_closed_type(kind):  # a user's subclass, with methods
                self._reach_type(kind)
        elif issubclass(kind, FunctionType):
            self._reach_function(value)
        elif issubclass(kind, CONTAINERS):
            self.containers.append((label.rstrip("."), value))
            self._reach_all(dict.values(value) if issubclass(kind, dict) else value, label)
        elif issubclass(kind, type):
            self._reach_type(value)
            self._reach_all(
                [vars(base)[name] for base in value.__mro__ for name in _CONSTRUCTORS if name in vars(base)], label
            )
        elif issubclass(kind, ModuleType):
            if not is_closed(value.__name__):
                self.owners.append(Owner(f"{value.__name__}.", vars(value), False, None, vars(value)))
        elif every or issubclass(kind, (nn.Module, *OPEN, *WHOLE)) or not is_closed_type(kind):
            self._reach_object(value, label, every or issubclass(kind, WHOLE))

    def _reach_all(self, values: Any, label: str) -> None:
        for value in values:
            self.reach(value, label)

    def _reach_object(self, value: Any, label: str, every: bool) -> None:
        dynamic = not issubclass(type(value), nn.Module) and any(
            name in vars(cls) for cls in type(value).__mro__[:-1] for name in ("__getattr__", "__getattribute__")
        )
        store = _own_store(value)
        self._reach_type(type(value))
        if store is not _NO_STORE:
            self.owners.append(Owner(label, store, every or dynamic, type(value)))
        for cls in type(value).__mro__:
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                    with suppress(AttributeError):  # empty so far
                        self._add(f"{label}{name}", Attribute(value, name), name)

    def _reach_type(self, cls: type) -> None:
        if id(cls) in self._types:
            return
        self._types.add(id(cls))
        if not is_closed_type(type(cls)):
            self._reach_type(type(cls))
        for base in cls.__mro__:
            ours = not is_closed_type(base)
            if id(base) in self._known and base is not cls:
                continue
            self._known.add(id(base))
            self._kept.append(base)
            if ours or issubclass(base, nn.Module):
                self.owners.append(Owner(f"{base.__qualname__}.", vars(base), False, None, base if ours else None))
            if ours:
                special = {name: value for name, value in vars(base).items() if name.startswith("__")}
                self._constructors += [
                    (f"{base.__qualname__}.", special.pop(name)) for name in _CONSTRUCTORS if name in special
                ]
                self._reach_all(filter(callable, special.values()), f"{base.__qualname__}.")

    def _reach_function(self, fn: FunctionType) -> None:
        names = names_in(fn.__code__)
        self.attributes |= names.attributes
        if not is_closed(fn.__globals__.get("__name__", "")):  # not __module__: functools.wraps copies it
            if "-packages" not in fn.__code__.co_filename:  # installed code is not edited while it runs
                self.functions.append(fn)
            self._reach_globals(fn, names)
            if attributes := vars(fn):
                self.owners.append(Owner(f"{fn.__qualname__}.", attributes, False, FunctionType))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with suppress(ValueError):  # empty so far
                self._add(f"{name} of {fn.__qualname__}", Attribute(cell, "cell_contents"), "cell_contents")
        self._reach_all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()), f"{fn.__qualname__}.")
        self.reach(getattr(fn, "__wrapped__", None), "")

    def _reach_globals(self, fn: FunctionType, names: Names) -> None:
        where = fn.__globals__
        self.environment |= names.environment
        self.asks |= names.asks
        self._any_attribute |= names.any_attribute
        self._creates |= names.creates
        for name in sorted(names.read | names.written | (where.keys() if names.any_global else set())):
            if name in where and (id(where), name) not in self._global:
                self._global.add((id(where), name))
                self._add(f"global {name}", where, name)
        self.globals += [(f"global {name}", where, name) for name in sorted(names.written)]

    def _follow(self) -> None:
        """Add every attribute with one of the names, until there are no more."""
        done = -1
        while self._waiting or done != len(self.attributes) + len(self.owners):
            done = len(self.attributes) + len(self.owners)
            while self._waiting:
                self._look_into(*self._waiting.popleft())
            while self._creates and self._constructors:
                label, constructor = self._constructors.pop()
                self.reach(constructor, label)
            for owner in list(self.owners):
                own = owner.kind is not None and not is_closed_type(owner.kind)
                every = owner.every or (self._any_attribute and own)
                named = owner.store.keys() if every else owner.store.keys() & self.attributes
                for name in sorted(named - owner.seen - OWN_STORES):
                    owner.seen.add(name)
                    self._add(f"{owner.label}{name}", owner.store, name)

    def _add(self, label: str, store: Any, key: Any) -> None:
        self.reach(store[key], f"{label}.")
        self.items.append((label, store, key))
