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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from partway.options.algo import AlgoParameters
from partway.options.in_force import InForce
from partway.options.parallel import ParallelContext
from partway.options.typed import AlgoOptions, ParallelOptions, listing

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
