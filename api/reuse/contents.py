"""What objects of Python's own types, and of NumPy's, hold that a function may read.

A dict or an object of a user's class shows what is in it. A weak reference, a variable of a context or an array does
not: for each kind that has a value which may change there is a line here that says how it is read.
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

MOST = 2**16  # bytes that are compared before each call
_WHOLE = (
    collections.ChainMap, collections.UserDict, collections.UserList, configparser.RawConfigParser,
    configparser.SectionProxy, functools.partialmethod, functools.singledispatchmethod, queue.Queue,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
)  # fmt: skip
_NOTHING: Any = object()


@dataclass(frozen=True)
class Held:
    """What an object holds.

    objects   what to look into
    names     the attributes that it reads of other objects
    read      its value, as it is now: comparable
    draws     it is a random generator, and that value its state
    whole     its attributes are all that there is to it
    """

    objects: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    read: Callable[[], Any] | None = None
    draws: bool = False
    whole: bool = False


def held(value: Any) -> Held | None:
    """What `value` holds, if it is of a type that is known here."""
    kind = type(value)
    if issubclass(kind, _WHOLE) or kind.__module__ == "multiprocessing.sharedctypes":
        return Held(whole=True)
    if _is_ctypes(kind):
        return _bytes(value)
    tell = next((tell for known, tell in _KINDS.items() if issubclass(kind, known)), _of_numpy)
    return tell(value)


def unread(value: Any) -> bool:
    """Whether `value` has a value that may change, and is never compared."""
    kind = type(value)
    counts = hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)
    return counts or issubclass(kind, random.SystemRandom) or (_size(value) is not None and held(value) is None)


def _size(value: Any) -> int | None:
    """The bytes of an array."""
    kind = type(value)
    if issubclass(kind, array.array | bytearray | memoryview) or _is_ctypes(kind):
        with suppress(ValueError):  # released
            return memoryview(value).nbytes
    number = getattr(sys.modules.get("numpy"), "generic", ())  # of which each stays what it is
    if hasattr(kind, "__array_interface__") and not issubclass(kind, number):
        return int(getattr(value, "nbytes", MOST + 1))
    return None


def _is_ctypes(kind: type) -> bool:
    return any(base.__module__ == "_ctypes" for base in kind.__mro__)


def _bytes(value: Any) -> Held | None:
    size = _size(value)
    return None if size is None or size > MOST else Held(read=lambda: memoryview(value).tobytes())


def _of_numpy(value: Any) -> Held | None:
    kind, numpy = type(value), sys.modules.get("numpy")
    if numpy is None:
        return None
    if issubclass(kind, numpy.random.Generator):
        return _of_numpy(value.bit_generator)
    if issubclass(kind, numpy.random.BitGenerator):
        return Held(read=lambda: repr(value.state), draws=True)
    if issubclass(kind, numpy.random.RandomState):
        return Held(read=lambda: repr(value.get_state()), draws=True)
    if issubclass(kind, numpy.ndarray) and value.nbytes <= MOST and not value.dtype.hasobject:
        return Held(read=lambda: (value.shape, value.strides, value.dtype.str, value.tobytes()))
    return None


def _bound(value: Any) -> Held:
    owner = value.__self__
    return Held(() if isinstance(owner, ModuleType) else (owner,))


def _named(value: Any) -> Held:
    """An attrgetter, itemgetter or methodcaller, which only its pickle describes."""
    _, given, *_ = value.__reduce__()
    texts = [text for text in given if isinstance(text, str)]
    return Held(tuple(given), frozenset(part for text in texts for part in text.split(".")))


def _of_thread(value: threading.local) -> Held:
    def attributes() -> dict[str, Any]:
        return dict(vars(value))

    return Held(tuple(attributes().values()), read=attributes)


def _of_context(value: contextvars.ContextVar[Any]) -> Held:
    return Held((value.get(None),), read=lambda: value.get(_NOTHING))


def _of_mapping(value: Mapping[Any, Any]) -> Held:
    return Held(tuple(value.values()), read=lambda: dict(value))


_KINDS: Mapping[type, Callable[[Any], Held | None]] = {
    weakref.ref: lambda value: Held((value(),), read=value),
    type(functools.lru_cache(lambda: None)): lambda value: Held((value.__wrapped__,)),
    BuiltinMethodType: _bound,
    MethodWrapperType: _bound,
    operator.attrgetter: _named,
    operator.itemgetter: _named,
    operator.methodcaller: _named,
    MappingProxyType: _of_mapping,
    threading.local: _of_thread,
    contextvars.ContextVar: _of_context,
    random.SystemRandom: lambda _: Held(),
    random.Random: lambda value: Held(read=value.getstate, draws=True),
    array.array: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    io.StringIO: lambda value: Held(read=lambda: None if value.closed else (value.tell(), value.getvalue())),
    io.BytesIO: lambda value: Held(read=lambda: None if value.closed else (value.tell(), value.getvalue())),
}
