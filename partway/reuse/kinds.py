"""The kinds of objects that a function may read: what is inside each, and when two values count as the same.

The contents of a dict or of a user's object are visible. Those of a weak reference, a context variable or an array are
not: each common kind with a changing value has a row in `_KINDS` that reads it, and `unwatched` names the others.
"""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import contextvars
import functools
import io
import operator
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import Same
from partway.reuse.libraries import is_closed_type

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    Enum, range, slice,
)  # fmt: skip
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
# objects of libraries that are inspected as those of users; of the second ones libraries' code reads all attributes
OPEN = (SimpleNamespace, argparse.Namespace)
WHOLE = (collections.ChainMap, collections.UserDict, collections.UserList)
MOST_BYTES = 2**16  # bytes of an array that are compared before each call
# Python modules that return another value at each call
_CLOCKS = {"datetime": "clock", "secrets": "source of random bytes", "time": "clock", "uuid": "source of random bytes"}
# containers whose changes nobody looks for, since few functions read them
_UNWATCHED = (
    array.array, bytearray, memoryview, io.StringIO, io.BytesIO, queue.Queue, queue.SimpleQueue, random.SystemRandom,
    threading.local, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary,
    configparser.RawConfigParser, configparser.SectionProxy,
)  # fmt: skip
_UNWATCHED_HOMES = ("_ctypes", "multiprocessing.sharedctypes", "multiprocessing.managers", "multiprocessing.queues")
_NOTHING: Any = object()


@dataclass(frozen=True)
class ObjectKind:
    """How a kind of objects is inspected.

    inside    the objects inside
    read      the current value, compared before each call; None: it changes only with the objects inside
    draws     whether it is a random generator, whose value is its state
    names     the attributes that it reads of other objects
    """

    inside: Callable[[Any], Iterable[Any]] = lambda _: ()
    read: Callable[[Any], Any] | None = None
    draws: bool = False
    names: Callable[[Any], Iterable[str]] = lambda _: ()


def kind_of(value: Any) -> ObjectKind | None:
    """The row of the type of `value`; None if it has none, and for arrays too large to compare."""
    kind = next((_KINDS[base] for base in type(value).__mro__ if base in _KINDS), None)
    return None if kind is _ARRAY and (value.nbytes > MOST_BYTES or value.dtype.hasobject) else kind


def unwatched(value: Any) -> str:
    """What `value` is, in a word, if its changes cannot be noticed; else ""."""
    kind = type(value)
    if issubclass(kind, ModuleType | type | FunctionType | BuiltinFunctionType):
        return _CLOCKS.get(str(value.__name__ if isinstance(value, ModuleType) else value.__module__), "")
    counts = hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)
    arrays = hasattr(kind, "__array_interface__") and not issubclass(kind, np.generic) and kind_of(value) is None
    rare = issubclass(kind, _UNWATCHED) or any(base.__module__ in _UNWATCHED_HOMES for base in kind.__mro__)
    return kind.__name__ if counts or arrays or rare else ""


def _wrapped(*names: str) -> ObjectKind:
    return ObjectKind(lambda value: [getattr(value, name) for name in names])


def _given_names(value: Any) -> Any:
    """The arguments of an attrgetter, itemgetter or methodcaller, which only the pickle shows."""
    return value.__reduce__()[1]


def _parts_of_names(value: Any) -> list[str]:
    return [part for text in _given_names(value) if isinstance(text, str) for part in text.split(".")]


_BOUND = ObjectKind(lambda value: () if isinstance(value.__self__, ModuleType) else (value.__self__,))
_GETTER = ObjectKind(_given_names, names=_parts_of_names)
_ARRAY = ObjectKind(read=lambda value: (value.shape, value.strides, value.dtype.str, value.tobytes()))
_KINDS: Mapping[type, ObjectKind] = {
    functools.partial: _wrapped("func", "args", "keywords"),
    functools.partialmethod: _wrapped("func", "args", "keywords"),
    functools.singledispatchmethod: _wrapped("func", "dispatcher"),
    functools.cached_property: _wrapped("func"),
    type(functools.lru_cache(lambda: None)): _wrapped("__wrapped__"),
    property: _wrapped("fget", "fset", "fdel"),
    classmethod: _wrapped("__func__"),
    staticmethod: _wrapped("__func__"),
    MethodType: _wrapped("__func__", "__self__"),
    BuiltinMethodType: _BOUND,
    MethodWrapperType: _BOUND,
    operator.attrgetter: _GETTER,
    operator.itemgetter: _GETTER,
    operator.methodcaller: _GETTER,
    weakref.ref: ObjectKind(lambda value: (value(),), lambda value: value()),
    MappingProxyType: ObjectKind(lambda value: value.values(), dict),
    contextvars.ContextVar: ObjectKind(lambda value: (value.get(None),), lambda value: value.get(_NOTHING)),
    random.Random: ObjectKind(read=lambda value: value.getstate(), draws=True),
    random.SystemRandom: ObjectKind(),
    np.random.Generator: ObjectKind(read=lambda value: repr(value.bit_generator.state), draws=True),
    np.random.BitGenerator: ObjectKind(read=lambda value: repr(value.state), draws=True),
    np.random.RandomState: ObjectKind(read=lambda value: repr(value.get_state()), draws=True),
    np.ndarray: _ARRAY,
}


def fact(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """The fact of a value, equal for values that count as the same: the value of numbers and strings, the type of
    objects that are watched themselves, the identity of tensors, functions and everything else (or the result of
    `leaf`). A container of any depth has the facts of its elements in order; a repeated container has its number."""
    leaf = leaf or _leaf
    if not issubclass(type(value), CONTAINERS):
        return leaf(value)
    facts: list[Any] = []
    numbers: dict[int, int] = {}
    waiting: list[Any] = [value]
    while waiting:
        current = waiting.pop()
        kind = type(current)
        if not issubclass(kind, CONTAINERS):
            facts.append(leaf(current))
        elif id(current) in numbers:
            facts.append((kind, "again", numbers[id(current)]))
        elif issubclass(kind, set | frozenset):
            facts.append((kind, tuple(sorted((fact(element, leaf) for element in current), key=repr))))
        else:
            if not issubclass(kind, tuple):
                numbers[id(current)] = len(numbers)
            facts.append((kind, len(current)))
            waiting += reversed([*elements_of(current)])
    return tuple(facts)


def _leaf(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, PLAIN):
        return kind, repr(value) if kind in (float, complex) else str(value) if kind is slice else value
    if issubclass(kind, MethodType):
        return Same(value.__func__), type(value.__self__)
    if issubclass(kind, nn.Module):
        return kind
    own = issubclass(kind, (Tensor, type, FunctionType, ModuleType)) or is_closed_type(kind)
    return Same(value) if own and not issubclass(kind, OPEN) else kind


def likeness(value: Any) -> Any:
    """The fact of a value that the function itself replaces: for a tensor its shape, dtype and requires_grad."""
    return fact(value, _leaf_likeness)


def _leaf_likeness(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.requires_grad
    return _leaf(value)


def containers_in(value: Any) -> Iterator[Any]:
    """`value` if it is a container, and the containers in it of any depth, each once."""
    waiting, known = [value], set[int]()
    while waiting:
        current = waiting.pop()
        if issubclass(type(current), CONTAINERS) and id(current) not in known:
            known.add(id(current))
            yield current
            waiting += elements_of(current)


def elements_of(container: Any) -> Any:
    """The keys and values of a dict, the elements of another container."""
    return chain(dict.keys(container), dict.values(container)) if isinstance(container, dict) else container
