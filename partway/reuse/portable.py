"""The state of a function as a digest that is the same in other processes.

In one process most objects that a function can reach are compared by identity (kinds.py). Another process has other
objects, which are compared by their contents: code by its instructions, libraries by their versions. An object with
hidden contents has no digest, and neither has a value that depends on it.
"""

from __future__ import annotations

import enum
import hashlib
import io
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import Same
from partway.reuse.kinds import CONTAINERS, PLAIN, elements_of, kind_of
from partway.reuse.libraries import OF_PYTHON, is_closed

MOST_BYTES = 2**24  # of one tensor
MOST_VALUES = 10**6

_PLAIN = (*PLAIN, type(NotImplemented), type(...))
_UNNUMBERED = (Same, *_PLAIN)
# identified by name: parts of Python, or of a library whose version is in the digest
_BY_NAME = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_Parts = tuple[Any, Iterable[Any]]  # the head of a value, text or bytes, and the values in it


class NotPortableError(Exception):
    """A value cannot be compared with one in another process."""


def digest(*values: Any) -> str:
    """A digest of `values`, by their contents. Raises NotPortableError if they have hidden contents."""
    found = hashlib.sha256()
    numbers: dict[int, int] = {}  # of the objects written so far, by id
    kept: list[Any] = []  # keeps the objects alive, so that their ids stay unique
    libraries: set[str] = set()
    waiting = [*reversed(values)]
    for _ in range(MOST_VALUES):
        if not waiting:
            versions = [f"{name} {getattr(sys.modules.get(name), '__version__', '')}" for name in sorted(libraries)]
            found.update("\0".join((*versions, sys.version)).encode())
            return found.hexdigest()
        value = waiting.pop()
        head: Any
        if id(value) in numbers:
            head = f"again {numbers[id(value)]}"
        else:
            if not issubclass(type(value), _UNNUMBERED):
                numbers[id(value)] = len(numbers)
                kept.append(value)
            for named in (value, type(value)):
                if issubclass(type(named), type | types.FunctionType | types.ModuleType) and is_closed(_home(named)):
                    libraries.add(str(_home(named)).partition(".")[0])
            head, parts = _parts(value, type(value))
            waiting += reversed([*parts])
        found.update(head if isinstance(head, bytes) else head.encode(errors="surrogatepass") + b"\0")
    raise NotPortableError("there is too much to compare")


def _home(value: Any) -> Any:
    return value.__name__ if isinstance(value, types.ModuleType) else value.__module__


def _name(value: Any) -> str:
    return f"{type(value).__name__} {_home(value)} {getattr(value, '__qualname__', '')}"


def _parts(value: Any, kind: type) -> _Parts:
    """The head of a value, and the values in it."""
    for kinds, parts in _KINDS:
        if issubclass(kind, kinds):
            return parts(value)
    known = kind_of(value)
    if known is not None:
        return _name(kind), (*known.inside(value), known.read and known.read(value))
    if callable(value) and hasattr(value, "__wrapped__"):
        return kind.__name__, (value.__wrapped__,)
    return _attributes(value, kind)


def _plain(value: Any) -> _Parts:
    own: Any = next(base for base in type(value).__mro__ if base in _PLAIN)  # a subclass may have any repr
    return f"{type(value).__qualname__} {own.__repr__(value)}", ()


def _function(value: types.FunctionType) -> _Parts:
    if is_closed(value.__globals__.get("__name__")):  # functools.wraps copies `__module__`
        return _name(value), ()
    return _name(value), (value.__code__, value.__defaults__, value.__kwdefaults__)


def _part_of_python(value: Any) -> _Parts:
    owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
    head = f"{type(value).__name__} {getattr(owner, '__module__', owner)} {value.__qualname__}"
    return head, (getattr(value, "__self__", None),)


def _generator(value: types.GeneratorType[Any, Any, Any]) -> _Parts:
    if value.gi_frame is None or value.gi_frame.f_lasti > 1:
        raise NotPortableError(f"a generator under way, {value.__qualname__}")
    return "generator", (value.gi_code, value.gi_frame.f_locals)


def _code(code: types.CodeType) -> _Parts:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    head = f"code {code.co_qualname} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount}"
    return head, (code.co_code, names, code.co_consts)


def _tensor(tensor: Tensor) -> _Parts:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        raise NotPortableError(f"a {type(tensor).__name__} on {tensor.device}")
    if tensor.nbytes > MOST_BYTES:
        raise NotPortableError(f"a tensor of {tensor.nbytes} bytes")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    facts = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
    return plain.numpy().tobytes(), (facts, tensor.stride())


def _attributes(value: Any, kind: type) -> _Parts:
    """The parts of an object that consists of its attributes."""
    slots = [
        name
        for base in kind.__mro__
        for name, own in vars(base).items()
        if isinstance(own, types.MemberDescriptorType) and not name.startswith("__")
    ]
    store = getattr(value, "__dict__", None)
    built_in = next(base for base in kind.__mro__ if not base.__flags__ & OF_PYTHON)
    if built_in is not object or (store is None and not slots and kind is not object):
        raise NotPortableError(f"a {kind.__module__}.{kind.__qualname__}")
    return _name(kind), ({name: getattr(value, name, None) for name in slots}, store)


_KINDS: Sequence[tuple[Any, Callable[[Any], _Parts]]] = (
    (Same, lambda value: ("", (value.value,))),
    (enum.Enum, lambda value: (f"{_name(type(value))}.{value.name}", (value.value,))),
    (_PLAIN, _plain),
    (nn.Module, lambda value: (_name(type(value)), ())),  # its reachable attributes are written separately
    (type | types.ModuleType, lambda value: (_name(value), ())),
    (logging.Logger, lambda value: (f"logger {value.name}", ())),
    # their contents affect no numbers
    ((type(threading.Lock()), type(threading.RLock()), io.TextIOWrapper), lambda value: (_name(type(value)), ())),
    (set | frozenset, lambda value: (f"{_name(type(value))} {len(value)} {sorted(map(digest, value))}", ())),
    (CONTAINERS, lambda value: (f"{_name(type(value))} {len(value)}", elements_of(value))),
    (Tensor, _tensor),
    (types.CodeType, _code),
    (types.FunctionType, _function),
    (_BY_NAME, _part_of_python),
    (types.GeneratorType, _generator),
    (types.UnionType | types.GenericAlias, lambda value: (repr(value), ())),
    (re.Pattern, lambda value: (f"pattern {value.pattern!r} {value.flags}", ())),
)
