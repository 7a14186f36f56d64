"""The names that a piece of code reads and writes, and the properties of its call that it queries."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

_ENVIRONMENT = frozenset({"environ", "getenv"})
_GRADIENTS = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
_BY_TEXT = frozenset({"eval", "exec", "globals"})
# names that create an object of another one's class
_CREATE_LIKE = frozenset({"__class__", "__new__", "__replace__", "_replace", "copy", "deepcopy", "replace", "type"})
# names that depend on a tensor's memory layout (beside those that a stand-in refuses)
_MEMORY = frozenset(
    {
        "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "data_ptr", "dim_order", "is_contiguous",
        "istft", "set_", "stft", "stride", "typed_storage",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """The names that some code reads as attributes and as globals, and the globals that it writes."""

    attributes: frozenset[str]
    read: frozenset[str]
    written: frozenset[str]
    any_attribute: bool  # it reads attributes by computed names, or all of them
    any_global: bool  # it reads globals by computed names
    creates: bool  # it may create objects of classes that it does not name

    @property
    def environment(self) -> bool:
        """Whether the code may read variables of the environment."""
        return bool((self.attributes | self.read) & _ENVIRONMENT)

    @property
    def asks(self) -> Asks:
        """The properties of its call that the code queries."""
        used = self.attributes | self.read
        return Asks(bool(used & _MEMORY), bool(used & _GRADIENTS))


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> Names:
    """The names in `code` and in the functions that it defines."""
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
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    if read & {"getattr", "hasattr", "attrgetter"}:  # names in strings
        attributes |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    computed = "vars" in read or "__dict__" in attributes or (formats and "getattr" in read)
    return Names(
        frozenset(attributes).union(*(n.attributes for n in inner)),
        frozenset(read).union(*(n.read for n in inner)),
        frozenset(written).union(*(n.written for n in inner)),
        any_attribute=computed or any(n.any_attribute for n in inner),
        any_global=bool(read & _BY_TEXT) or any(n.any_global for n in inner),
        creates=bool((read | attributes) & _CREATE_LIKE) or any(n.creates for n in inner),
    )


@dataclass(frozen=True)
class Asks:
    """The properties of its call, beside shapes and values, that code queries: the layout of tensors in `memory`, and
    whether `gradients` are enabled."""

    memory: bool = False
    gradients: bool = False

    def __or__(self, other: Asks) -> Asks:
        return Asks(self.memory or other.memory, self.gradients or other.gradients)

    def answers(self, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """The answers for a call with these tensors; None for a property that is not queried."""
        return (
            tuple(t.stride() for t in tensors) if self.memory else None,
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) if self.gradients else None,
        )
