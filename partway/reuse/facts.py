"""Facts: comparable values, equal if two values that a function reads count as the same."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import chain
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import Same
from partway.reuse.libraries import is_closed_type

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    Enum, range, slice,
)  # fmt: skip
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
OPEN_TYPES = (SimpleNamespace, argparse.Namespace)


def fact(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """The fact of a value, equal for values that count as the same: the value of numbers and strings, the type of
    objects that are watched themselves, the identity of tensors, functions and everything else (or the result of
    `leaf`). A container of any depth has the facts of its elements in order; a repeated container has its number."""
    if not issubclass(type(value), CONTAINERS):
        return (leaf or _leaf)(value)
    facts: list[Any] = []
    numbers: dict[int, int] = {}
    waiting: list[Any] = [value]
    while waiting:
        current = waiting.pop()
        if not issubclass(type(current), CONTAINERS):
            facts.append((leaf or _leaf)(current))
        elif id(current) in numbers:
            facts.append((type(current), "again", numbers[id(current)]))
        elif issubclass(type(current), set | frozenset):
            facts.append((type(current), tuple(sorted((fact(element, leaf) for element in current), key=repr))))
        else:
            if not issubclass(type(current), tuple):
                numbers[id(current)] = len(numbers)
            facts.append((type(current), len(current)))
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
    if issubclass(kind, (Tensor, type, FunctionType, ModuleType)):
        return Same(value)
    return Same(value) if is_closed_type(kind) and not issubclass(kind, OPEN_TYPES) else kind


def likeness(value: Any) -> Any:
    """The fact of a value that the function itself replaces: for a tensor its shape, dtype and requires_grad."""
    return fact(value, _leaf_likeness)


def _leaf_likeness(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.requires_grad
    return _leaf(value)


def elements_of(container: Any) -> Any:
    """The keys and values of a dict, the elements of another container."""
    return chain(dict.keys(container), dict.values(container)) if isinstance(container, dict) else container
