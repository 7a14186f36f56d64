"""The parallel context: the options of the process and those of `with` blocks, and the only place that holds them.

    set_auto_parallel_context(device_num=8, search_mode="sharding_propagation")
    with auto_parallel_context(device_num=4): ...      # only in this block
    set_algo_parameters(fully_use_devices=False)

Names and meanings are MindSpore's. A call sets all its options or none: each value is frozen, validated once, and
replaced as a whole. Options set outside of a `with` hold in every thread. A `with` belongs to its thread (or asyncio
task): it takes the options at its entry, changed by its arguments. Changes that the thread makes inside end with the
`with`, which does not see changes by other threads. A thread that starts inside has the options of the process.

Options of MindSpore that would have no effect here do not exist; the error for one says what to use instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar, Unpack

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from partway.options.algo import AlgoParameters
from partway.options.base import FrozenOptions
from partway.options.parallel import ParallelContext
from partway.options.typed import AlgoOptions, ParallelOptions, listing
from partway.strategy.basics.blocks import afterwards
from partway.strategy.basics.choice import Choice
from partway.strategy.basics.suggest import did_you_mean
from partway.strategy.errors import ContextError, StrategyError, shown

# -- From pydantic's errors to one error in the user's words


def _refusal(value: object, accepts: str) -> str:
    return f"got {shown(value, 80)} ({type(value).__name__}); accepts {accepts}"


def _accepts(field: FieldInfo) -> str:
    if field.description:
        return field.description
    kind = field.annotation
    assert isinstance(kind, type) and issubclass(kind, Choice | bool), f"{field} has no description"
    return "True or False" if kind is bool else f"one of {', '.join(map(repr, kind))}"


def _nested(field: FieldInfo) -> type[FrozenOptions] | None:
    """The options inside a field whose type is options."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, FrozenOptions) else None


def unknown_option(options: type[FrozenOptions], key: object, path: str) -> str:
    """The problem of `key`, written as `path`, which is not one of `options`."""
    if key in options.absent:
        return f"{path} is MindSpore's and not an option here: {options.absent[str(key)]}"
    meant = did_you_mean(str(key), options.model_fields)
    every = ", ".join(options.model_fields)
    return f"{path} is not an option" + (f"; {meant}" if meant else "") + f" (all options: {every})"


def _explain(options: type[FrozenOptions], error: ErrorDetails, value: Any) -> Iterable[str]:
    """The problems, as text, of one of pydantic's errors."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, StrategyError):
        return map(str, cause.problems)
    texts: tuple[str, ...] = cause.args if isinstance(cause, ValueError) else ()
    if not error["loc"]:
        return texts
    path = ""
    for key in error["loc"]:
        path = f'{path}["{key}"]' if path else str(key)
        field = options.model_fields.get(str(key))
        if field is None:
            return [unknown_option(options, key, path)]
        accepts = _accepts(field)
        value, options = value.get(key), _nested(field) or options
    what = f"is missing; accepts {accepts}" if error["type"] == "missing" else _refusal(value, accepts)
    return [f"{path}: {text}" for text in texts or (what,)]


def problems_with(options: type[FrozenOptions], settings: Mapping[str, object]) -> list[str]:
    """Every problem of `settings`: wrong ones first, then contradictions between the others."""
    try:
        options.model_validate(settings)
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
    else:
        return []
    wrong = {error["loc"][0] for error in errors if error["loc"]}
    others = {key: value for key, value in settings.items() if key not in wrong}
    texts = [text for error in errors for text in _explain(options, error, settings)]
    return texts + (problems_with(options, others) if wrong else [])


def context_error(title: str, problems: Iterable[str]) -> ContextError:
    """The error that lists `problems` under `title`."""
    return ContextError("\n".join([title, *("  - " + text.replace("\n", "\n  ") for text in problems)]))


# -- The value in force: that of the process, or of a `with` around this thread's code

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


# -- What users call

_parallel = InForce(ParallelContext())
_algo = InForce(AlgoParameters())


def current() -> ParallelContext:
    """The parallel context in force; print it for a table of all options."""
    return _parallel.value


def current_algo() -> AlgoParameters:
    """The options of the strategy search in force; print them for a table."""
    return _algo.value


@listing(ParallelOptions, ParallelContext)
def set_auto_parallel_context(**kwargs: Unpack[ParallelOptions]) -> None:
    """Set options of the parallel context; the others stay as they are. Inside a `with auto_parallel_context` the
    change lasts until its end.

    Raises ContextError (a ValueError) that lists every wrong option, and then changes none.
    """
    _parallel.update("set_auto_parallel_context", dict(kwargs))


def get_auto_parallel_context(key: str) -> Any:
    """The value of one option, in the form that `set_auto_parallel_context` takes. Raises ContextError for an unknown
    one."""
    return _parallel.get("get_auto_parallel_context", key)


def reset_auto_parallel_context() -> None:
    """Reset every option to its default, as if none had been set."""
    _parallel.reset()


@listing(ParallelOptions, ParallelContext)
@contextmanager
def auto_parallel_context(**kwargs: Unpack[ParallelOptions]) -> Iterator[ParallelContext]:
    """Set options inside a `with`, for this thread; at its end, also by an exception, the old options are restored.

    Raises ContextError on entering, as `set_auto_parallel_context`. Also works as a decorator.
    """
    with _parallel.block("auto_parallel_context", dict(kwargs)) as options:
        yield options


@listing(AlgoOptions, AlgoParameters)
def set_algo_parameters(**kwargs: Unpack[AlgoOptions]) -> None:
    """Set options of the strategy search; raises as `set_auto_parallel_context`."""
    _algo.update("set_algo_parameters", dict(kwargs))


def get_algo_parameters(key: str) -> Any:
    """The value of one option of the strategy search. Raises ContextError for an unknown one."""
    return _algo.get("get_algo_parameters", key)


def reset_algo_parameters() -> None:
    """Reset every option of the strategy search to its default."""
    _algo.reset()
