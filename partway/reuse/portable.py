"""The state of a function as a digest that is the same in other processes.

In one process most objects that a function can reach are compared by identity (facts.py). Another process has other
objects, which are compared by their contents: code by its instructions, libraries by their versions. An object with
hidden contents has no digest, and neither has a value that depends on it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import Same
from partway.reuse.contents import Contents, contents_of
from partway.reuse.facts import CONTAINERS, elements_of
from partway.reuse.libraries import OF_PYTHON, is_closed

MOST_BYTES = 2**24  # of one tensor
MOST_VALUES = 10**6

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(NotImplemented), type(...),
)  # fmt: skip
# identified by name: parts of Python, or of a library whose version is in the digest
_BY_NAME = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
# wrappers, and the attributes with the wrapped functions
_WRAPPERS: Mapping[type, tuple[str, ...]] = {
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    types.MethodType: ("__func__", "__self__"),
    types.CellType: ("cell_contents",),
    functools.partial: ("func", "args", "keywords"),
}
_EMPTY = (type(threading.Lock()), type(threading.RLock()), object)  # their contents affect no numbers


class NotPortableError(Exception):
    """A value cannot be compared with one in another process."""


def digest(*values: Any) -> str:
    """A digest of `values`, by their contents. Raises NotPortableError if they have hidden contents."""
    writer = _Writer()
    for value in values:
        writer.write(value)
    return writer.finish()


class _Writer:
    """Writes values into a digest, each object once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}  # of the objects written so far, by id
        self._kept: list[Any] = []  # keeps the objects alive, so that their ids stay unique
        self._libraries: set[str] = set()
        self._count = 0

    def finish(self) -> str:
        """The digest of all values, and of the versions of the libraries among them."""
        for name in sorted(self._libraries):
            self._text(f"{name} {getattr(sys.modules.get(name), '__version__', '')}")
        self._text(sys.version)
        return self._hash.hexdigest()

    def write(self, value: Any) -> None:
        """Write `value` and its contents."""
        waiting = [value]
        while waiting:
            waiting += reversed([*self._parts(waiting.pop())])
            self._count += 1
            if self._count > MOST_VALUES:
                raise NotPortableError("there is too much to compare")

    def _text(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass") + b"\0")

    def _parts(self, value: Any) -> Iterator[Any]:
        """Write the head of `value`, and yield the values to be written next."""
        kind = type(value)
        if kind is Same:
            yield value.value
        elif issubclass(kind, enum.Enum):
            self._named(kind, f"{kind.__qualname__}.{value.name}")
            yield value.value
        elif issubclass(kind, _PLAIN):
            own: Any = next(base for base in kind.__mro__ if base in _PLAIN)  # a subclass may have any repr
            self._text(f"{kind.__qualname__} {own.__repr__(value)}")
        elif issubclass(kind, nn.Module):  # its reachable attributes are written separately
            self._named(kind, kind.__qualname__)
        elif issubclass(kind, type):
            self._named(value, value.__qualname__)
        elif issubclass(kind, types.ModuleType):
            self._named(value, value.__name__)
        elif issubclass(kind, logging.Logger):
            self._text(f"logger {value.name}")
        elif kind in _EMPTY or issubclass(kind, io.TextIOWrapper):
            self._text(kind.__name__)
        elif id(value) in self._numbers:
            self._text(f"again {self._numbers[id(value)]}")
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
            yield from self._contents(value, kind)

    def _named(self, value: Any, name: str) -> None:
        home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        if is_closed(home):
            self._libraries.add(str(home).partition(".")[0])
        self._text(f"{type(value).__name__} {home} {name}")

    def _contents(self, value: Any, kind: type) -> Iterator[Any]:
        for kinds, write in _WRITERS:
            if issubclass(kind, kinds):
                return write(self, value)
        if kind in _WRAPPERS or (hasattr(value, "__wrapped__") and callable(value)):
            return self._wrapper(value, kind)
        contents = contents_of(value)
        if contents is not None and not contents.whole:
            return self._known(contents, kind)
        return self._attributes(value, kind)

    def _set(self, value: Any) -> Iterator[Any]:
        self._text(f"{type(value).__name__} {len(value)} {sorted(map(digest, value))}")
        yield from ()

    def _container(self, value: Any) -> Iterator[Any]:
        self._text(f"{type(value).__module__}.{type(value).__qualname__} {len(value)}")
        yield from elements_of(value)

    def _function(self, value: types.FunctionType) -> Iterator[Any]:
        self._named(value, value.__qualname__)
        if not is_closed(value.__globals__.get("__name__")):  # functools.wraps copies `__module__`
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)

    def _part_of_python(self, value: Any) -> Iterator[Any]:
        owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
        self._text(f"{type(value).__name__} {getattr(owner, '__module__', owner)} {value.__qualname__}")
        yield getattr(value, "__self__", None)

    def _generator(self, value: types.GeneratorType[Any, Any, Any]) -> Iterator[Any]:
        if value.gi_frame is None or value.gi_frame.f_lasti > 1:
            raise NotPortableError(f"a generator under way, {value.__qualname__}")
        yield from (value.gi_code, value.gi_frame.f_locals)

    def _annotation(self, value: Any) -> Iterator[Any]:
        self._text(repr(value))
        yield from ()

    def _pattern(self, value: re.Pattern[Any]) -> Iterator[Any]:
        self._text(f"pattern {value.pattern!r} {value.flags}")
        yield from ()

    def _wrapper(self, value: Any, kind: type) -> Iterator[Any]:
        self._text(kind.__name__)
        yield from (getattr(value, name) for name in _WRAPPERS.get(kind, ("__wrapped__",)))

    def _known(self, contents: Contents, kind: type) -> Iterator[Any]:
        self._text(f"{kind.__module__}.{kind.__qualname__}")
        yield contents.objects
        if contents.read is not None:
            yield contents.read()

    def _attributes(self, value: Any, kind: type) -> Iterator[Any]:
        """Write an object that consists of its attributes."""
        slots = [
            name
            for base in kind.__mro__
            for name, own in vars(base).items()
            if isinstance(own, types.MemberDescriptorType) and not name.startswith("__")
        ]
        store = getattr(value, "__dict__", None)
        built_in = next(base for base in kind.__mro__ if not base.__flags__ & OF_PYTHON)
        if built_in is not object or (store is None and not slots):
            raise NotPortableError(f"a {kind.__module__}.{kind.__qualname__}")
        self._named(kind, kind.__qualname__)
        yield {name: getattr(value, name, None) for name in slots}
        yield store

    def _code(self, code: types.CodeType) -> Iterator[Any]:
        self._text(f"code {code.co_qualname} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount}")
        yield code.co_code
        yield (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        yield code.co_consts

    def _tensor(self, tensor: Tensor) -> Iterator[Any]:
        plain = tensor.detach()
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
            raise NotPortableError(f"a {type(tensor).__name__} on {tensor.device}")
        if tensor.nbytes > MOST_BYTES:
            raise NotPortableError(f"a tensor of {tensor.nbytes} bytes")
        self._text(f"tensor {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}")
        self._hash.update(plain.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        yield tensor.stride()


_WRITERS: tuple[tuple[Any, Callable[[_Writer, Any], Iterator[Any]]], ...] = (
    (set | frozenset, _Writer._set),
    (CONTAINERS, _Writer._container),
    (Tensor, _Writer._tensor),
    (types.CodeType, _Writer._code),
    (types.FunctionType, _Writer._function),
    (_BY_NAME, _Writer._part_of_python),
    (types.GeneratorType, _Writer._generator),
    (types.UnionType | types.GenericAlias, _Writer._annotation),
    (re.Pattern, _Writer._pattern),
)
