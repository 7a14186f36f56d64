"""The value in force of some options: that of the process, or of a `with` around this thread's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from partway.options.base import FrozenOptions
from partway.options.refusals import context_error, problems_with, unknown_option
from partway.strategy.basics.afterwards import afterwards
from partway.strategy.errors import shown

OptionsT = TypeVar("OptionsT", bound=FrozenOptions)


class InForce(Generic[OptionsT]):
    """One frozen value for the process, and one for each `with` in this thread; each is replaced as a whole."""

    def __init__(self, default: OptionsT) -> None:
        self._default = self._process = default
        self._lock = Lock()
        self._blocks: ContextVar[tuple[tuple[object, OptionsT], ...]] = ContextVar(type(default).__name__, default=())

    @property
    def value(self) -> OptionsT:
        """The value in force: that of the innermost block, or of the process."""
        blocks = self._blocks.get()
        return blocks[-1][1] if blocks else self._process

    def update(self, call: str, settings: Mapping[str, object]) -> None:
        """Merge all of `settings` into the value in force, or none if one is wrong."""
        if self._blocks.get():
            self._replace(self._merged(call, settings))
            return
        with self._lock:
            self._process = self._merged(call, settings)

    def reset(self) -> None:
        """Put the defaults in force."""
        self._replace(self._default)

    @contextmanager
    def block(self, call: str, settings: Mapping[str, object]) -> Iterator[OptionsT]:
        """Merge `settings` into the value in force, for the block and this thread."""
        entered, merged = object(), self._merged(call, settings)

        def leave() -> None:  # blocks of generators may end in any order
            self._blocks.set(tuple(block for block in self._blocks.get() if block[0] is not entered))

        with afterwards(leave):
            self._blocks.set((*self._blocks.get(), (entered, merged)))
            yield merged

    def get(self, call: str, key: str) -> Any:
        """The value of one option, for the function `call`. Raises ContextError for an unknown one."""
        options = type(self.value)
        if not isinstance(key, str) or key not in options.model_fields:
            name = key if isinstance(key, str) else shown(key)
            raise context_error(f"{call}:", [unknown_option(options, name, name)])
        return self.value.model_dump()[key]

    def _merged(self, call: str, settings: Mapping[str, object]) -> OptionsT:
        before = self.value
        merged = {**{key: getattr(before, key) for key in before.model_fields_set}, **settings}
        try:
            return type(before).model_validate(merged)
        except ValidationError:
            raise context_error(f"{call} changed nothing:", problems_with(type(before), merged)) from None
        except RecursionError:
            raise context_error(f"{call} changed nothing:", ["a value is nested too deeply"]) from None

    def _replace(self, value: OptionsT) -> None:
        if blocks := self._blocks.get():
            self._blocks.set((*blocks[:-1], (blocks[-1][0], value)))
        else:
            self._process = value
