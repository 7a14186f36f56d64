"""What a captured function reads beside its arguments, parameters and buffers, and what it leaves behind in Python.

Capture runs the Python of a function once; a plan holds for as long as that Python would do the same again. So what it
may have read is compared before each call: attributes of modules and of the objects that they hold, globals, what
functions close over, elements of lists and dicts. No read is intercepted. Which names a function reads is seen in its
code, and whatever has one of them where the function can reach it is watched: too much rather than too little, since
watching costs a comparison of identities. What a function writes there is done again after each call.

Anything may lie there, such as what raises an error when an attribute is asked for or `isinstance` (which asks for
`__class__`): so of what is not known it is the type that is asked.
"""

from __future__ import annotations

import argparse
import dis
import functools
import os
import sys
import sysconfig
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy as duplicate
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter, getitem
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)  # fmt: skip
from typing import Any

import torch
from torch import Tensor, nn

from partway.attached import ATTRIBUTE
from partway.propagation.capture.capture import state_of
from partway.propagation.capture.hooks import Noted, tracks
from partway.propagation.graph.structure import Same, flatten, name_of
from partway.propagation.torch_internals import module_hooks
from partway.reuse.contents import held, unread
from partway.strategy import CaptureError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    Enum, range, slice,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# of these nothing is looked into: what they read is theirs, and no number of a model
_TOOLS = (
    "IPython", "PIL", "_pytest", "accelerate", "deepspeed", "einops", "einx", "filelock", "frozendict",
    "huggingface_hub", "hypothesis", "jinja2", "lightning", "loguru", "matplotlib", "mlflow", "mpmath", "networkx",
    "numpy", "packaging", "pandas", "partway", "pluggy", "pydantic", "pytest", "pytorch_lightning", "requests", "rich",
    "safetensors", "scipy", "sklearn", "sympy", "tokenizers", "torch", "tqdm", "typer", "typing_extensions", "wandb",
    "yaml",
)  # fmt: skip
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
# Python modules that give another value at each call
_SOURCES = {"datetime": "clock", "secrets": "source of random bytes", "time": "clock", "uuid": "source of random bytes"}
_ENVIRONMENT = frozenset({"environ", "getenv"})
_GRADIENTS = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
_BY_TEXT = frozenset({"eval", "exec", "globals"})
# what makes an object like another one
_MAKERS = frozenset({"__class__", "__new__", "__replace__", "_replace", "copy", "deepcopy", "replace", "type"})
# what depends on how a tensor lies in memory (beside what a stand-in refuses to say)
_MEMORY = frozenset(
    {
        "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "data_ptr", "dim_order", "is_contiguous",
        "istft", "set_", "stft", "stride", "typed_storage",
    }
)  # fmt: skip
_OPEN_TYPES = (SimpleNamespace, argparse.Namespace)
# torch's own stores, which the guard watches, and ours
_OWN = frozenset(vars(nn.Module())) | {ATTRIBUTE}
_ALWAYS = frozenset({"forward"})  # what runs though no code names it
_OF_PYTHON = 1 << 9  # the flag of a type that a class statement or `type()` made (Py_TPFLAGS_HEAPTYPE)
_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_MAKING = ("__new__", "__init__", "__post_init__")
_VALUES = "the values of a tensor from outside"
_GONE: Any = object()
_NO_STORE: Mapping[str, Any] = {}


# -- Code --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The names that some code reads as attributes and as globals, and the globals that it writes."""

    attributes: frozenset[str]
    read: frozenset[str]
    written: frozenset[str]
    made_up: bool  # attributes are read by names that the code makes up, or all of them
    makes: bool  # it may make an object of a class that it does not name
    any_global: bool  # it reads globals by names that it makes up


@functools.lru_cache(maxsize=8192)
def _names(code: CodeType) -> _Names:
    attributes, read, written, formats = set[str](), set[str](), set[str](), False
    for step in dis.get_instructions(code):
        name, value = step.opname, step.argval
        formats |= name in ("BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(value)
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(value)
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    if read & {"getattr", "hasattr", "attrgetter"}:  # by a name that is a text
        attributes |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    return _Names(
        frozenset(attributes).union(*(n.attributes for n in inner)),
        frozenset(read).union(*(n.read for n in inner)),
        frozenset(written).union(*(n.written for n in inner)),
        "vars" in read or "__dict__" in attributes or (formats and "getattr" in read) or any(n.made_up for n in inner),
        bool(read & _MAKERS or attributes & _MAKERS) or any(n.makes for n in inner),
        bool(read & _BY_TEXT) or any(n.any_global for n in inner),
    )


def _is_closed(module: Any) -> bool:
    return not isinstance(module, str) or _is_library(module.partition(".")[0])  # C code may have no name there


@functools.cache
def _is_library(name: str) -> bool:
    """Whether a Python module of this name is of those that are not looked into. (A `code` in a folder of the user's is
    not that of the standard library.)"""
    if name not in sys.stdlib_module_names:
        return name in _TOOLS
    place = getattr(sys.modules.get(name), "__file__", None)  # none: it is part of Python itself
    return place is None or (place.startswith(_STANDARD) and "-packages" not in place)


def _is_closed_type(kind: type) -> bool:
    """Whether a type is a library's: found there, too, since one that is made by `type()` or make_dataclass may say
    that it comes from where it was made."""
    if not _is_closed(kind.__module__):
        return False
    place = sys.modules.get(kind.__module__)
    made_here = place is None or hasattr(place, kind.__qualname__.partition(".")[0])
    return made_here or not kind.__flags__ & _OF_PYTHON


@dataclass(frozen=True)
class Asks:
    """What code asks of how it is called, beside shapes and values: how tensors lie in `memory`, and whether
    `gradients` are enabled."""

    memory: bool = False
    gradients: bool = False

    def __or__(self, other: Asks) -> Asks:
        return Asks(self.memory or other.memory, self.gradients or other.gradients)

    def answers(self, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """What a call of these tensors is told; nothing of what is not asked."""
        return (
            tuple(t.stride() for t in tensors) if self.memory else None,
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) if self.gradients else None,
        )


def _home(value: Any) -> str | None:
    """The Python module that this one, a class or a function comes from; this one itself."""
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def _own_store(value: Any) -> Mapping[str, Any]:
    """The attributes that an object itself has."""
    try:
        store = object.__getattribute__(value, "__dict__")
    except Exception:  # of a proxy whose object is not there, any error
        return _NO_STORE
    return store if isinstance(store, dict) else _NO_STORE


# -- What can be reached -----------------------------------------------------------------------------------------------


@dataclass
class _Owner:
    """Something with attributes: its name, where they are, and whether all of them count or those that code names.
    `kind`: its type; None of a class or a Python module, which is `static` then, if it is nobody's library."""

    label: str
    store: Mapping[str, Any]
    every: bool
    kind: type | None
    static: Any = None
    seen: set[str] = field(default_factory=set)


class _Reached:
    """All that the code of a function can reach by the names in it."""

    def __init__(self, fn: Callable[..., Any], observers: frozenset[int]) -> None:
        self.attributes = set(_ALWAYS)
        self.owners: list[_Owner] = []
        self.items: list[tuple[str, Mapping[Any, Any], Any]] = []  # a label, a store and a key
        self.getters: list[tuple[str, Any, str]] = []  # a label, an object and an attribute: cells, slots
        self.globals: list[tuple[str, MutableMapping[str, Any], str]] = []  # those that code writes
        self.containers: list[tuple[str, Any]] = []
        self.environment = False  # whether code reads variables of the environment
        self.asks = Asks()
        self._made_up = False  # whether code makes up the names of attributes
        self._makes = False  # whether code makes objects of classes that it does not name
        self._makers: list[tuple[str, Any]] = []  # of classes that were reached by their objects
        self.reads: list[tuple[str, Callable[[], Any], bool]] = []  # a label, what reads it, and if it is drawn from
        self.functions: list[FunctionType] = []  # those whose code may change
        self.unwatched: list[tuple[str, str]] = []
        self._waiting = deque[tuple[Any, str, bool]]()  # what has been reached and not looked into
        self._known: set[int] = set()
        self._global: set[tuple[int, str]] = set()
        self._kept: list[Any] = []  # what is known stays alive, so that no other object gets its id
        if isinstance(fn, nn.Module):
            for path, module in fn.named_modules():
                self.reach(module, f"{path}." if path else "")
            for name, tensor in state_of(fn).items():  # attributes that people gave them
                self.owners.append(_Owner(f"{name}.", vars(tensor), False, type(tensor)))
            for _, _, store in module_hooks(fn):
                for hook in store.values():
                    if id(hook) not in observers and not tracks(hook):
                        self.reach(hook, f"hook {name_of(hook)}.", every=True)
        else:
            self.reach(fn, "")
        self._follow()

    def reach(self, value: Any, label: str, every: bool = False) -> None:
        """Look into `value` in its turn: its attributes have names that begin with `label`."""
        if issubclass(type(value), (*_PLAIN, Tensor)) or id(value) in self._known:
            return
        self._known.add(id(value))
        self._kept.append(value)
        self._waiting.append((value, label, every))

    def _look_into(self, value: Any, label: str, every: bool) -> None:
        self._note(value, label.rstrip("."))
        if (found := held(value)) is None:
            self._look_at(value, label, every)
        elif found.whole:
            self._reach_object(value, label, every=True)
        else:
            self.attributes |= found.names
            if found.read is not None:
                self.reads.append((label.rstrip("."), found.read, found.draws))
            self._reach_all(found.objects, label)
            if not _is_closed_type(type(value)):  # a user's, with methods
                self._reach_type(type(value))

    def _note(self, value: Any, label: str) -> None:
        """Note what nobody can watch."""
        kind = type(value)
        if issubclass(kind, ModuleType | type | FunctionType | BuiltinFunctionType) and _home(value) in _SOURCES:
            self.unwatched.append((label, _SOURCES[str(_home(value))]))
        if unread(value):
            self.unwatched.append((label, kind.__name__))

    def _look_at(self, value: Any, label: str, every: bool) -> None:
        kind = type(value)
        if issubclass(kind, functools.partial):
            self._reach_all((value.func, *value.args, *value.keywords.values()), label)
        elif issubclass(kind, MethodType):
            self._reach_all((value.__func__, value.__self__), label)
        elif issubclass(kind, staticmethod | classmethod):
            self._makes |= issubclass(kind, classmethod)
            self.reach(value.__func__, label)
        elif issubclass(kind, property | functools.cached_property):
            self._reach_all((getattr(value, "fget", None), getattr(value, "func", None)), label)
        elif issubclass(kind, FunctionType):
            self._reach_function(value)
        elif issubclass(kind, _CONTAINERS):
            self.containers.append((label.rstrip("."), value))
            self._reach_all(dict.values(value) if issubclass(kind, dict) else value, label)
        elif issubclass(kind, type):
            self._reach_type(value)
            self._reach_all(
                [vars(base)[name] for base in value.__mro__ for name in _MAKING if name in vars(base)], label
            )
        elif issubclass(kind, ModuleType):
            if not _is_closed(value.__name__):
                self.owners.append(_Owner(f"{value.__name__}.", vars(value), False, None, value))
        elif issubclass(kind, nn.Module) or every or issubclass(kind, _OPEN_TYPES) or not _is_closed_type(kind):
            self._reach_object(value, label, every)

    def _reach_all(self, values: Any, label: str) -> None:
        for value in values:
            self.reach(value, label)

    def _reach_object(self, value: Any, label: str, every: bool) -> None:
        dynamic = not issubclass(type(value), nn.Module) and any(
            name in vars(cls) for cls in type(value).__mro__[:-1] for name in ("__getattr__", "__getattribute__")
        )
        store = _own_store(value)
        if (engine := store.get("_engine")) is not None and _is_closed_type(type(engine)):
            self.reach(engine.fn, label)  # a function that is sharded
            return
        self._reach_type(type(value))
        if store is not _NO_STORE:
            self.owners.append(_Owner(label, store, every or dynamic, type(value)))
        for cls in type(value).__mro__:
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                    with suppress(AttributeError):  # nothing in it yet
                        self.reach(slot.__get__(value), f"{label}{name}.")
                        self.getters.append((f"{label}{name}", value, name))

    def _reach_type(self, cls: type) -> None:
        if not _is_closed_type(type(cls)) and id(type(cls)) not in self._known:
            self._reach_type(type(cls))
        for base in cls.__mro__:
            ours = not _is_closed_type(base)
            if id(base) in self._known and base is not cls:
                continue
            self._known.add(id(base))
            self._kept.append(base)
            if ours or issubclass(base, nn.Module):
                self.owners.append(_Owner(f"{base.__qualname__}.", vars(base), False, None, base if ours else None))
            if ours:
                special = {name: value for name, value in vars(base).items() if name.startswith("__")}
                self._makers += [(f"{base.__qualname__}.", special.pop(name)) for name in _MAKING if name in special]
                self._reach_all(filter(callable, special.values()), f"{base.__qualname__}.")

    def _reach_function(self, fn: FunctionType) -> None:
        names = _names(fn.__code__)
        self.attributes |= names.attributes
        if not _is_closed(fn.__globals__.get("__name__", "")):  # not __module__, which functools.wraps copies
            if "-packages" not in fn.__code__.co_filename:  # what is installed is not edited while it runs
                self.functions.append(fn)
            self._reach_globals(fn, names)
            if attributes := vars(fn):
                self.owners.append(_Owner(f"{fn.__qualname__}.", attributes, False, FunctionType))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing in it yet
                continue
            label = f"{name} of {fn.__qualname__}"
            self.getters.append((label, cell, "cell_contents"))
            self.reach(value, f"{label}.")
        self._reach_all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()), f"{fn.__qualname__}.")
        self.reach(getattr(fn, "__wrapped__", None), "")

    def _reach_globals(self, fn: FunctionType, names: _Names) -> None:
        where = fn.__globals__
        used = names.attributes | names.read
        self.environment |= bool(used & _ENVIRONMENT)
        self.asks |= Asks(bool(used & _MEMORY), bool(used & _GRADIENTS))
        self._made_up |= names.made_up
        self._makes |= names.makes
        for name in sorted(names.read | names.written | (where.keys() if names.any_global else set())):
            if name in where and (id(where), name) not in self._global:
                self._global.add((id(where), name))
                self._add(f"global {name}", where, name)
        self.globals += [(f"global {name}", where, name) for name in sorted(names.written)]

    def _follow(self) -> None:
        """Add what has one of the names, until there is no more."""
        done = -1
        while self._waiting or done != len(self.attributes) + len(self.owners):
            done = len(self.attributes) + len(self.owners)
            while self._waiting:
                self._look_into(*self._waiting.popleft())
            while self._makes and self._makers:
                label, maker = self._makers.pop()
                self.reach(maker, label)
            for owner in list(self.owners):
                own = owner.kind is not None and not _is_closed_type(owner.kind)
                every = owner.every or (self._made_up and own)
                named = owner.store.keys() if every else owner.store.keys() & self.attributes
                for name in sorted(named - owner.seen - _OWN):
                    owner.seen.add(name)
                    self._add(f"{owner.label}{name}", owner.store, name)

    def _add(self, label: str, store: Mapping[Any, Any], key: Any) -> None:
        self.items.append((label, store, key))
        self.reach(store[key], f"{label}.")


# -- Values ------------------------------------------------------------------------------------------------------------


def fact(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """What must be equal for two values to be alike: numbers and texts by value, what is watched itself by its type,
    tensors, functions and everything else by identity (by what `leaf` says of it). Of containers, however deep, what
    is in them one after another; of one that comes again only which it is."""
    if not issubclass(type(value), _CONTAINERS):
        return (leaf or _leaf)(value)
    found: list[Any] = []
    numbers: dict[int, int] = {}
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if not issubclass(type(one), _CONTAINERS):
            found.append((leaf or _leaf)(one))
        elif id(one) in numbers:
            found.append((type(one), "again", numbers[id(one)]))
        elif issubclass(type(one), set | frozenset):
            found.append((type(one), tuple(sorted((fact(each, leaf) for each in one), key=repr))))
        else:
            if not issubclass(type(one), tuple):
                numbers[id(one)] = len(numbers)
            found.append((type(one), len(one)))
            waiting += reversed([*_flat(one)])
    return tuple(found)


def _leaf(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, _PLAIN):
        return kind, repr(value) if kind in (float, complex) else str(value) if kind is slice else value
    if issubclass(kind, MethodType):
        return Same(value.__func__), type(value.__self__)
    if issubclass(kind, nn.Module):
        return kind
    if issubclass(kind, (Tensor, type, FunctionType, ModuleType)):
        return Same(value)
    return Same(value) if _is_closed_type(kind) and not issubclass(kind, _OPEN_TYPES) else kind


def _kept_fact(value: Any) -> Any:
    """The fact of what the function itself replaces: of tensors what they are like."""
    return fact(value, _kept_leaf)


def _kept_leaf(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.requires_grad
    return _leaf(value)


class State:
    """What the plan of `fn` depends on beside a call and its tensors, as it is now.

    `observers`: the ids of hooks that a plan does not depend on, since they run at each call; `kept`: the labels of
    what the function replaces by itself, of which only what it is like counts; `read`: the tensors of which it took
    values for numbers.
    """

    def __init__(
        self, fn: Callable[..., Any], observers: frozenset[int] = frozenset(), kept: frozenset[str] = frozenset(),
        read: tuple[Tensor, ...] = (),
    ) -> None:  # fmt: skip
        self.observers, self.kept, self.read = observers, kept, read
        self._versions = [*map(_version, read)]
        found = self.reached = _Reached(fn, observers)
        items = [(label, store, key) for label, store, key in found.items if label not in kept]
        self._own = [(store, key, _kept_fact(store[key])) for label, store, key in found.items if label in kept]
        self._stores, self._keys = [store for _, store, _ in items], [key for _, _, key in items]
        self._values = [*map(getitem, self._stores, self._keys)]
        self._ids = [*map(id, self._values)]
        self._cells = [(one, name, getattr(one, name)) for label, one, name in found.getters if label not in kept]
        self._own_cells = [
            (one, name, _kept_fact(getattr(one, name))) for label, one, name in found.getters if label in kept
        ]
        self._reads = [(label, read, fact(read())) for label, read, draws in found.reads if not draws]
        self._functions = found.functions
        self._codes = [*chain.from_iterable(map(_CODE, found.functions))]  # held, so that no other gets their ids
        self._code_ids = [*map(id, self._codes)]
        # a new name may hide what is read: an object's that of its class, a class's that of its base
        owned = [one.store for one in found.owners if one.kind is not None or isinstance(one.static, type)]
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        hooks = [store for _, _, store in module_hooks(fn)]
        inside = [value for label, value in found.containers if label not in kept and not isinstance(value, tuple)]
        stores = [store for _, m in modules for store in (m._modules, m._buffers)]
        # what is in all of these one after another, how many in each, and what is empty
        self._views = [*chain.from_iterable(map(_views, inside)), *(store.values() for store in stores if store)]
        self._views += [store.keys() for store in hooks if store]
        self._elements = [*chain.from_iterable(self._views)]
        self._element_ids = [*map(id, self._elements)]
        self._sized = [*self._views, *owned]
        self._sizes = [*map(len, self._sized)]
        self._empty = [store for store in (*stores, *hooks) if not store]
        self._environment = dict(os.environ) if found.environment else None
        self.facts = self._facts(modules, found)

    def _facts(self, modules: Sequence[tuple[str, nn.Module]], found: _Reached) -> dict[str, Any]:
        facts: dict[str, Any] = {f"class of {path or 'the module'}": type(module) for path, module in modules}
        places = Counter[str]()  # of one name
        for path, module in modules:
            for name, buffer in module._buffers.items():
                place = f"buffer {path}.{name}" if path else f"buffer {name}"
                facts[place] = None if buffer is None else (tuple(buffer.shape), buffer.dtype, buffer.device)
        for i, (where, kind, hooks) in enumerate(module_hooks(self._root(modules))):
            known = tuple(Same(hook) for hook in hooks.values() if not tracks(hook))
            facts[f"{kind} hooks of {where or 'all modules'} ({i})"] = known
        if self._environment is not None:
            facts["os.environ"] = tuple(self._environment.items())
        for label, store, key in found.items:
            fact_of = _kept_fact if label in self.kept else fact
            facts[_numbered(label, places)] = fact_of(store[key])
        for label, value, name in found.getters:
            fact_of = _kept_fact if label in self.kept else fact
            facts[_numbered(label, places)] = fact_of(getattr(value, name))
        for label, _, value_before in self._reads:
            facts[_numbered(label, places)] = value_before
        facts[_VALUES] = _versioned(self.read, self._versions)
        for function in found.functions:
            code, *defaults = _CODE(function)
            facts[_numbered(f"the code of {function.__qualname__}", places)] = Same(code), fact(defaults)
        return facts

    @staticmethod
    def _root(modules: Sequence[tuple[str, nn.Module]]) -> Any:
        return modules[0][1] if modules else None

    def holds(self) -> bool:
        """Whether all is as it was. (That it does not hold may be for something that does not count.)"""
        try:
            return (
                [*map(len, self._sized)] == self._sizes
                and not any(self._empty)
                and [*map(id, chain.from_iterable(self._views))] == self._element_ids
                and (self._environment is None or self._environment == dict(os.environ))
                and (not self._cells or all(getattr(one, name) is value for one, name, value in self._cells))
                and [*map(id, chain.from_iterable(map(_CODE, self._functions)))] == self._code_ids
                and (not self.read or [*map(_version, self.read)] == self._versions)
                and all(fact(read()) == before for _, read, before in self._reads)
                and self._are_as_before([*map(getitem, self._stores, self._keys)])
                and all(_kept_fact(store[key]) == fact for store, key, fact in self._own)
                and all(_kept_fact(getattr(one, name)) == fact for one, name, fact in self._own_cells)
            )
        except (AttributeError, KeyError, ValueError, RuntimeError):  # one of them is gone
            return False

    def _are_as_before(self, values: list[Any]) -> bool:
        ids = [*map(id, values)]
        if ids == self._ids:
            return True
        for before, now in zip(self._values, values, strict=True):
            if before is not now and not (issubclass(type(now), _PLAIN) and fact(before) == fact(now)):
                return False
        self._values, self._ids = values, ids
        return True

    def joined(self, other: State) -> State:
        """This one, and the values of tensors of `other` as they were for that."""
        joined = duplicate(self)
        more = [
            pair for pair in zip(other.read, other._versions, strict=True) if not any(pair[0] is t for t in self.read)
        ]
        joined.read = (*self.read, *(tensor for tensor, _ in more))
        joined._versions = [*self._versions, *(version for _, version in more)]
        joined.facts = self.facts | {_VALUES: _versioned(joined.read, joined._versions)}
        return joined

    def differences(self, other: State) -> list[str]:
        """The labels of what is unlike in two states."""
        labels = dict.fromkeys((*self.facts, *other.facts))
        return [label for label in labels if self.facts.get(label, _GONE) != other.facts.get(label, _GONE)]


def warn_of_unwatched(fn: Callable[..., Any], state: State) -> None:
    """Warn of what `fn` can read of which nobody sees that it changes."""
    for label, kind in dict.fromkeys(state.reached.unwatched):
        warnings.warn(
            f"{name_of(fn)} reads {label}, a {kind}, whose values cannot be watched: they are taken once, when a call "
            "is planned; make it a tensor in a buffer, or an argument",
            stacklevel=6,
        )


def _versioned(tensors: Sequence[Tensor], versions: Sequence[int]) -> Any:
    return tuple((Same(tensor), version) for tensor, version in zip(tensors, versions, strict=True))


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into, as far as PyTorch counts."""
    return 0 if tensor.is_inference() else tensor._version


def _numbered(label: str, places: Counter[str]) -> str:
    """`label`, with a number if there were such `places` before."""
    places[label] += 1
    return label if places[label] == 1 else f"{label} ({places[label]})"


def _views(container: Any) -> tuple[Any, ...]:
    return (dict.keys(container), dict.values(container)) if isinstance(container, dict) else (container,)


# -- What is written ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """That a function leaves a value in a place: its name, and what puts a value there."""

    label: str
    put: Callable[[Any], None]
    value: Any


class Effects:
    """What a function writes while it is captured: attributes of modules and objects, variables, elements of lists and
    dicts. When the capture is over all is as it was, and each call puts its own values there."""

    def __init__(self, fn: Callable[..., Any], state: State) -> None:
        self._fn, self._state = fn, state
        self._outside = _Before(fn, state.reached)
        self._before: _Before | None = None
        self.writes: tuple[Write, ...] = ()

    def begin(self) -> None:
        """The function begins to run."""
        self._before = _Before(self._fn, self._state.reached)

    def end(self) -> list[Any]:
        """The function has run: the values that it leaves. All is as it was again."""
        assert self._before is not None
        replaced, changed = self._before.replaced(), next(self._before.changed(), None)
        self.writes = tuple(self._before.writes())
        self._before.restore()
        if replaced:
            raise CaptureError(
                f"{name_of(self._fn)} replaces {', '.join(replaced)} while it runs, which a plan cannot do; keep what "
                "it computes in a buffer (register_buffer), or change parameters and modules between calls"
            )
        if changed is not None:
            label, drawn = changed
            raise CaptureError(
                f"{name_of(self._fn)} draws random numbers of {label}, and they would be the same in every call; draw "
                "them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
                if drawn
                else f"{name_of(self._fn)} changes {label}, which later calls would not do; change it outside the "
                "sharded function, or keep what changes in an attribute or a buffer"
            )
        return [write.value for write in self.writes]

    def abort(self) -> None:
        """The function was left by an error."""
        if self._before is not None:
            self._before.restore()

    def finish(self) -> None:
        """The capture is over, of which torch.export leaves copies of lists and dicts in place of those that were."""
        self._outside.restore()

    def noted(self) -> Noted:
        """What Python holds now."""
        return _Before(self._fn, self._state.reached)

    @property
    def kept(self) -> frozenset[str]:
        """The names of the places in which it leaves tensors."""
        return frozenset(write.label for write in self.writes if flatten(write.value)[0])

    def check(self, constants: Mapping[str, Tensor]) -> None:
        """Raise CaptureError if the function reads a tensor in a place where it leaves another one: one of `constants`,
        which are what it took from outside."""
        assert self._before is not None
        for write in self.writes:
            old = flatten(self._before.old.get(write.label))[0]
            if any(one is constant for one in old for constant in constants.values()):
                raise CaptureError(
                    f"{name_of(self._fn)} keeps a tensor in {write.label} from one call to the next, which would stay "
                    "what it was at the first; make it a buffer (register_buffer) or an argument that is returned, or "
                    "empty it before each call"
                )

    def put(self, values: Sequence[Any]) -> None:
        """Leave these values where the function leaves its own."""
        for write, value in zip(self.writes, values, strict=True):
            write.put(value)


class _Before:
    """What a function may write, as it is before."""

    def __init__(self, fn: Callable[..., Any], found: _Reached) -> None:
        self._dicts: dict[int, tuple[str, Any]]
        modules = list(fn.named_modules()) if isinstance(fn, nn.Module) else []
        self._dicts = {id(owner.store): (owner.label, owner.store) for owner in found.owners if owner.kind is not None}
        for path, module in modules:
            self._dicts[id(vars(module))] = f"{path}." if path else "", vars(module)
        self._copies = [
            (label, store, {name: value for name, value in store.items() if name not in _OWN})
            for label, store in self._dicts.values()
        ]
        self._buffers = [(path, m._buffers, dict(m._buffers)) for path, m in modules]
        self._fixed = [
            (kind, path, store, dict(store))
            for path, m in modules
            for kind, store in (("parameter", m._parameters), ("module", m._modules))
        ]
        self._statics = [
            (owner.label, owner.static, _own_names(owner.static)) for owner in found.owners if owner.static is not None
        ]
        self._getters = [(label, one, name, getattr(one, name)) for label, one, name in found.getters]
        self._globals = [(label, where, name, where.get(name, _GONE)) for label, where, name in found.globals]
        kept = [(f"{label}{name}", v) for label, _, copy in self._copies for name, v in copy.items()]
        every = {id(value): (label, value) for label, value in (*kept, *found.containers) if _is_mutable(value)}
        self._containers = [(label, value, _copy(value)) for label, value in every.values()]
        self._reads = [(label, read, draws, fact(read())) for label, read, draws in found.reads]
        self.old: dict[str, Any] = dict(kept) | {label: old for label, _, _, old in (*self._getters, *self._globals)}
        self.old |= {label: copy for label, _, copy in self._containers}

    def writes(self) -> Any:
        """What is another thing now than it was."""
        known = {id(container) for _, container, _ in self._containers}

        def kept(value: Any) -> Any:
            """What was there before stays that object, though it may be somewhere else now."""
            return _There(value) if id(value) in known else value

        for label, store, name, old in self._places():
            now = store.get(name, _GONE)
            if now is not old:
                yield Write(label, functools.partial(_put, store, name), kept(now))
        for label, one, copy in self._statics:
            for name, _, now in _changed(copy, _own_names(one)):
                yield Write(f"{label}{name}", functools.partial(_set, one, name), kept(now))
        for label, one, name, old in self._getters:
            if getattr(one, name) is not old:
                yield Write(label, functools.partial(_fill, one, name), kept(getattr(one, name)))
        for label, container, copy in self._containers:
            if not _holds_same(container, copy):
                yield Write(label, functools.partial(_refill, container), _copy(container, kept))

    def _places(self) -> Any:
        """The places in dicts, each with its label and what was there."""
        for label, store, copy in self._copies:
            for name in dict.fromkeys((*copy, *(n for n in store if n not in _OWN))):
                yield f"{label}{name}", store, name, copy.get(name, _GONE)
        for path, store, copy in self._buffers:
            for name in dict.fromkeys((*copy, *store)):
                yield f"{path}.{name}" if path else name, store, name, copy.get(name, _GONE)
        yield from self._globals

    def replaced(self) -> list[str]:
        """The parameters, and modules with tensors, that are others now, or gone, or new."""
        return [
            f"{kind} {path}.{name}" if path else f"{kind} {name}"
            for kind, path, store, copy in self._fixed
            for name, old, now in _changed(copy, store)
            if _has_tensors(now) or _has_tensors(old)
        ]

    def changed(self) -> Iterator[tuple[str, bool]]:
        """What has another value now, and where nobody puts one; whether it was drawn from."""
        for label, read, draws, before in self._reads:
            if fact(read()) != before:
                yield label, draws

    def left(self) -> list[Any]:
        """What has been put somewhere since."""
        return [write.value for write in self.writes()]

    def restore(self) -> None:
        """Make everything what it was."""
        for _, store, copy in self._copies:
            for name in [name for name in store if name not in _OWN and name not in copy]:
                del store[name]
            store.update(copy)
        for _, store, copy in self._buffers:
            _refill(store, copy)
        for _, _, store, copy in self._fixed:
            _refill(store, copy)
        for _, one, copy in self._statics:
            for name, old, _ in _changed(copy, _own_names(one)):
                _set(one, name, old)
        for _, one, name, old in self._getters:
            if getattr(one, name) is not old:
                _fill(one, name, old)
        for _, where, name, old in self._globals:
            _put(where, name, old)
        for _, container, copy in self._containers:
            _refill(container, copy)


def _has_tensors(value: Any) -> bool:
    """Whether this is a parameter, or a module that has some or buffers."""
    return issubclass(type(value), Tensor) or (
        issubclass(type(value), nn.Module) and any(True for _ in chain(value.parameters(), value.buffers()))
    )


def _is_mutable(value: Any) -> bool:
    return issubclass(type(value), list | dict | set | deque)


def _flat(container: Any) -> Any:
    return chain(dict.keys(container), dict.values(container)) if isinstance(container, dict) else container


def _holds_same(one: Any, other: Any) -> bool:
    """Whether two containers of one type hold the very same things."""
    if isinstance(one, set):
        return set(map(id, one)) == set(map(id, other))
    return len(one) == len(other) and all(a is b for a, b in zip(_flat(one), _flat(other), strict=True))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What is another thing now: its name, what it was and what it is (_GONE: nothing)."""
    pairs = ((name, before.get(name, _GONE), now.get(name, _GONE)) for name in dict.fromkeys((*before, *now)))
    return [(name, old, new) for name, old, new in pairs if old is not new]


def _own_names(static: Any) -> dict[str, Any]:
    """The attributes of a class or a Python module, but for Python's own."""
    return {name: value for name, value in vars(static).items() if not name.startswith("__")}


def _put(store: MutableMapping[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        store.pop(name, None)
    else:
        store[name] = _unwrapped(value)


def _fill(one: Any, name: str, value: Any) -> None:
    """Put `value` into a slot or a cell: of a frozen object, too, as whatever changed it did."""
    object.__setattr__(one, name, _unwrapped(value))


def _set(one: Any, name: str, value: Any) -> None:
    if value is not _GONE:
        setattr(one, name, _unwrapped(value))
    elif name in vars(one):
        delattr(one, name)


class _There:
    """Stands for a container that was there before, and stays that object."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def _unwrapped(value: Any) -> Any:
    return value.held if isinstance(value, _There) else value


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
    """The type of Python's own of which a container is: a subclass may do more than to hold things."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _copy(container: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    if isinstance(container, dict):
        return {key: change(value) for key, value in dict.items(container)}
    return _base(container)(container if isinstance(container, set) else map(change, container))
