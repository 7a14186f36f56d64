"""Temporarily disabled hooks: those that compute parameters of a sharded module, outside a capture, and global module
hooks, while planning calls its own modules."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ....strategy.basics.afterwards import afterwards
from ....strategy.basics.under_way import meanwhile, under_way
from ...torch_internals import global_hooks
from .hook_kinds import KINDS, computes_parameters


def awake() -> contextlib.AbstractContextManager[None]:
    """Wake all hooks inside the block, in which a function is captured together with them."""
    return meanwhile(hooking=True)


def rest_outside(store: dict[int, Any], rest: bool) -> None:
    """Let the hooks in `store` that compute parameters `rest` except during a capture; without `rest`, wake them. Each
    is replaced by one of another class with the same attributes."""
    for key, hook in store.items():
        if computes_parameters(hook) and hasattr(hook, "_rests") is not rest:
            kind: Any = type(hook)
            other = _resting(kind) if rest else kind.__bases__[0]
            store[key] = other.__new__(other)
            store[key].__dict__ = vars(hook)


@functools.lru_cache(maxsize=4096)
def _resting(kind: Any) -> Any:
    """A subclass of `kind` whose call does nothing except during a capture."""

    def call(self: Any, module: Any, arguments: Any) -> Any:
        return kind.__call__(self, module, arguments) if under_way().hooking else None

    body = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "_rests": True}
    return type(kind.__name__, (kind,), body)


@contextlib.contextmanager
def none_of_all_modules() -> Iterator[None]:
    """Remove the global module hooks inside the block, in which planning calls its own modules."""
    saved = [(store, OrderedDict(store)) for store in map(global_hooks, KINDS)]

    def restore() -> None:
        for store, held in saved:
            store.update(held)

    with afterwards(restore):
        for store, _ in saved:
            store.clear()
        yield
