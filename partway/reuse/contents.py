"""The contents of objects of Python's own types, and of NumPy's, that a function may read.

The contents of a dict or of a user's object are visible. Those of a weak reference, a context variable or an array are
not: each kind with a changing value has a row here that reads it.
"""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import functools
import io
import operator
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinMethodType, MappingProxyType, MethodWrapperType, ModuleType
from typing import Any

MOST_BYTES = 2**16  # bytes that are compared before each call
_WHOLE = (
    collections.ChainMap, collections.UserDict, collections.UserList, configparser.RawConfigParser,
    configparser.SectionProxy, functools.partialmethod, functools.singledispatchmethod, queue.Queue,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
)  # fmt: skip
_NOTHING: Any = object()


@dataclass(frozen=True)
class Contents:
    """The contents of an object.

    objects   the objects inside, to be inspected
    names     the attributes that it reads from other objects
    read      returns its current value, which can be compared
    draws     whether it is a random generator, whose value is its state
    whole     whether its attributes are all of its contents
    """

    objects: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    read: Callable[[], Any] | None = None
    draws: bool = False
    whole: bool = False


def contents_of(value: Any) -> Contents | None:
    """The contents of `value`; None if its type has no row here."""
    kind = type(value)
    if issubclass(kind, _WHOLE) or kind.__module__ == "multiprocessing.sharedctypes":
        return Contents(whole=True)
    if _is_ctypes(kind):
        return _bytes(value)
    read = next((read for known, read in _KINDS.items() if issubclass(kind, known)), _of_numpy)
    return read(value)


def is_unwatched(value: Any) -> bool:
    """Whether changes of `value` cannot be noticed: it is a counter, or too large to compare."""
    kind = type(value)
    counts = hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)
    return counts or issubclass(kind, random.SystemRandom) or (_size(value) is not None and contents_of(value) is None)


def _size(value: Any) -> int | None:
    """The size of an array in bytes; None for any other object."""
    kind = type(value)
    if issubclass(kind, array.array | bytearray | memoryview) or _is_ctypes(kind):
        with suppress(ValueError):  # a released memoryview
            return memoryview(value).nbytes
    number = getattr(sys.modules.get("numpy"), "generic", ())  # its instances never change
    if hasattr(kind, "__array_interface__") and not issubclass(kind, number):
        return int(getattr(value, "nbytes", MOST_BYTES + 1))
    return None


def _is_ctypes(kind: type) -> bool:
    return any(base.__module__ == "_ctypes" for base in kind.__mro__)


def _bytes(value: Any) -> Contents | None:
    size = _size(value)
    return None if size is None or size > MOST_BYTES else Contents(read=lambda: memoryview(value).tobytes())


def _of_numpy(value: Any) -> Contents | None:
    kind, numpy = type(value), sys.modules.get("numpy")
    if numpy is None:
        return None
    if issubclass(kind, numpy.random.Generator):
        return _of_numpy(value.bit_generator)
    if issubclass(kind, numpy.random.BitGenerator):
        return Contents(read=lambda: repr(value.state), draws=True)
    if issubclass(kind, numpy.random.RandomState):
        return Contents(read=lambda: repr(value.get_state()), draws=True)
    if issubclass(kind, numpy.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return Contents(read=lambda: (value.shape, value.strides, value.dtype.str, value.tobytes()))
    return None


def _bound(value: Any) -> Contents:
    owner = value.__self__
    return Contents(() if isinstance(owner, ModuleType) else (owner,))


def _named(value: Any) -> Contents:
    """The contents of an attrgetter, itemgetter or methodcaller, of which only the pickle shows the names."""
    _, given, *_ = value.__reduce__()
    texts = [text for text in given if isinstance(text, str)]
    return Contents(tuple(given), frozenset(part for text in texts for part in text.split(".")))


def _of_thread(value: threading.local) -> Contents:
    def attributes() -> dict[str, Any]:
        return dict(vars(value))

    return Contents(tuple(attributes().values()), read=attributes)


def _of_context(value: contextvars.ContextVar[Any]) -> Contents:
    return Contents((value.get(None),), read=lambda: value.get(_NOTHING))


def _of_mapping(value: Mapping[Any, Any]) -> Contents:
    return Contents(tuple(value.values()), read=lambda: dict(value))


_KINDS: Mapping[type, Callable[[Any], Contents | None]] = {
    weakref.ref: lambda value: Contents((value(),), read=value),
    type(functools.lru_cache(lambda: None)): lambda value: Contents((value.__wrapped__,)),
    BuiltinMethodType: _bound,
    MethodWrapperType: _bound,
    operator.attrgetter: _named,
    operator.itemgetter: _named,
    operator.methodcaller: _named,
    MappingProxyType: _of_mapping,
    threading.local: _of_thread,
    contextvars.ContextVar: _of_context,
    random.SystemRandom: lambda _: Contents(),
    random.Random: lambda value: Contents(read=value.getstate, draws=True),
    array.array: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    io.StringIO: lambda value: Contents(read=lambda: None if value.closed else (value.tell(), value.getvalue())),
    io.BytesIO: lambda value: Contents(read=lambda: None if value.closed else (value.tell(), value.getvalue())),
}
