"""Functions that a person names on a command line, as `module:function` or `file.py:function`, and their exceptions.

The current folder is searched too, as by `python -m`. Tracebacks show only the person's own lines, and none of Partway,
PyTorch or Python.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from partway.propagation.graph.nodes import is_persons
from partway.strategy.basics.suggest import did_you_mean
from partway.strategy.errors import RuntimeStateError, shown

T = TypeVar("T")


def find(name: str, what: str = "model") -> Any:
    """The object that `name` names. `what`: its kind, for messages.

    Raises RuntimeStateError if there is no such module, file or function, and, with the lines of the person's code, if
    importing it raises.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise RuntimeStateError(
            f"{shown(name)} is not module:function; write one such as train:build or train.py:build"
        )
    is_file = place.endswith(".py")
    with raising(f"{what} {name!r}: {place}"):
        module = _file(place, what, name) if is_file else _module(place, what, name)
    found = getattr(module, attribute, None)
    if not callable(found):
        meant = did_you_mean(attribute, [key for key, value in vars(module).items() if _is_own(value, module)])
        kind = "file" if is_file else "module"
        said = f"{kind} {place!r} has no function {attribute!r} for {what} {name!r}"
        raise RuntimeStateError(f"{said}; {meant}" if meant else said)
    return found


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _module(place: str, what: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    cannot = f"cannot import the module of {what} {name!r}"
    if place.startswith("."):
        raise RuntimeStateError(f"{cannot}: it begins with a dot; write it in full, as in package.module:function")
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if f"{place}.".startswith(f"{error.name}."):
            raise RuntimeStateError(f"{cannot}: {error}") from error
        raise  # a module that theirs imports is missing


def _file(place: str, what: str, name: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise RuntimeStateError(f"there is no file {place!r} for {what} {name!r}; this is {os.getcwd()}")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python FILE` does
    sys.modules.setdefault(path.stem, module)  # its definitions may be looked up by the module's name
    spec.loader.exec_module(module)
    return module


def call(function: Callable[[], T], name: str) -> T:
    """Call a person's function. Raises RuntimeStateError, with the lines of their code, if it raises."""
    with raising(name):
        return function()


@contextmanager
def raising(where: str) -> Iterator[None]:
    """A block that runs a person's code: an exception becomes a RuntimeStateError that begins with `where`."""
    try:
        yield
    except RuntimeStateError:
        raise
    except SystemExit as error:
        raise RuntimeStateError(
            f"{where} ends the process (exit status {error.code}) where it is only to be read; put what it does as a "
            'script under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise RuntimeStateError(f"{where} raised {type(error).__name__}:\n{own_lines(error)}") from error


def kind_of(value: object) -> str:
    """The type of a value, for a message; for a tuple, the types of its elements."""
    if isinstance(value, tuple):
        return f"({', '.join(type(element).__name__ for element in value)})"
    return type(value).__name__


def own_lines(error: BaseException) -> str:
    """The traceback of `error` with only the frames of the person's own code."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if _is_theirs(frame.filename)])
    told.__cause__ = told.__context__ = None
    return "".join(told.format()).rstrip()


def _is_theirs(filename: str) -> bool:
    path = Path(filename).resolve()
    return is_persons(filename) and not any(path.is_relative_to(folder) for folder in _libraries())


def _libraries() -> Iterator[Path]:
    for folder in (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()):
        yield Path(folder).resolve()
