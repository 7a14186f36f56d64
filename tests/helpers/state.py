"""The module-level state of the core: values that functions write while Partway runs, and caches without a bound.

A table that is filled once and then only read is a constant. A value counts as state if a function rebinds its name
(`global`) or writes into it, or if its type is mutable by design: a ContextVar, a weak container, a lock, an iterator,
an object of a class of Partway's that is not frozen.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from pydantic import BaseModel
from sources import layer_of, package_of, sources, tree_of
from torch.utils.weak import WeakIdKeyDictionary

CORE = {module: path for module, path in sources().items() if layer_of(module) != "kits"}
_WRITTEN = (
    ContextVar, WeakKeyDictionary, WeakSet, WeakValueDictionary, WeakIdKeyDictionary, deque, bytearray, Iterator,
    itertools.count, type(threading.Lock()), type(threading.RLock()), threading.local, threading.Event,
)  # fmt: skip
_METHODS = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
)


def state() -> dict[str, frozenset[str]]:
    """The names of state, by module of the core."""
    found = {}
    for module, path in CORE.items():
        loaded = importlib.import_module(_name_of(module))
        stem, touched = _stem(module), _touched_in(path)
        writers = [_touched_in(other) for other in CORE.values() if other != path and stem in _imports(other)]
        names = frozenset(
            name
            for name in _bound(tree_of(path).body)
            if name in touched or _is_made_to_be_written(value := getattr(loaded, name, None))
            or (isinstance(value, dict | list | set) and any(name in written for written in writers))
        )  # fmt: skip
        if names:
            found[module] = names
    return found


def _stem(module: str) -> str:
    return module.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """The last words of the modules that a module imports, and of the names that it imports from them."""
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    return frozenset(
        word for node in nodes for word in ((node.module or "").split(".")[-1], *(n.name for n in node.names))
    )


@functools.cache
def _touched_in(path: Path) -> frozenset[str]:
    return frozenset(_touched(tree_of(path)))


def _is_made_to_be_written(value: object) -> bool:
    """Whether a value has a type that is mutable by design."""
    kind = type(value)
    if isinstance(value, _WRITTEN):
        return True
    if kind.__module__.partition(".")[0] != "partway" or isinstance(value, type | enum.Enum | tuple | frozenset | str):
        return False
    if isinstance(value, BaseModel):
        return not value.model_config.get("frozen")
    if is_dataclass(value):
        return not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return bool(getattr(value, "__dict__", None) or any(getattr(one, "__slots__", ()) for one in kind.__mro__))


def unbounded_caches(path: Path) -> Iterator[str]:
    """The functions of a module or of its classes that `functools` caches without a bound. A cache made inside a call
    lives as long as the result of the call, and is left out."""
    bodies = [tree_of(path).body, *(node.body for node in tree_of(path).body if isinstance(node, ast.ClassDef))]
    for statement in itertools.chain.from_iterable(bodies):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(map(_is_unbounded, statement.decorator_list)):
                yield statement.name
        elif (
            isinstance(statement, ast.Assign | ast.AnnAssign)
            and isinstance(statement.value, ast.Call)
            and (_is_unbounded(statement.value) or _is_unbounded(statement.value.func))
        ):
            yield ast.unparse(statement)


def _is_unbounded(node: ast.expr) -> bool:
    """Whether a decorator, or a call that makes one, is a cache without a number of entries."""
    called = node.func if isinstance(node, ast.Call) else node
    name = ast.unparse(called).rpartition(".")[2]
    if name == "lru_cache" and isinstance(node, ast.Call):
        sizes = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "maxsize")]
        return any(isinstance(size, ast.Constant) and size.value is None for size in sizes)
    return name == "cache"


def _name_of(module: str) -> str:
    stem = module.rpartition("/")[2].removesuffix(".py")
    return package_of(module) if stem == "__init__" else f"{package_of(module)}.{stem}"


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that a module binds to values at its top level."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            yield from _bound([*statement.body, *getattr(statement, "orelse", [])])
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name)) if target else ()


def _touched(tree: ast.Module) -> Iterator[str]:
    """The names, of this module or another, that functions of a module rebind or write into."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            rebound = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
            yield from rebound
            own = {
                node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            yield from (name for node in ast.walk(function) for name in _written_in(node) if name not in own - rebound)


def _written_in(node: ast.AST) -> Iterator[str]:
    """The names whose values a statement or a call writes into."""
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield from _roots(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        yield from _roots(node.func.value)


def _roots(node: ast.expr) -> Iterator[str]:
    """The name `TABLE` in `TABLE`, `TABLE[0]`, `TABLE.field` and `module.TABLE`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id not in ("self", "cls")
        ):
            yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
