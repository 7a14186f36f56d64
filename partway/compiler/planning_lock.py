"""One thread plans at a time, while no sharded call runs in another thread.

A capture changes state of the whole process: PyTorch's tracers replace methods of nn.Module and Function, modules have
other forwards and fake parameters for a while, warnings and loggers are silenced, and garbage collection is off. So a
planner waits for running sharded calls, later ones wait for it, and a plan that two of them need is made once. As with
torch.compile, plain calls of other threads do not wait.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

from partway.propagation.torch_internals import without_dispatch_modes
from partway.strategy.basics.blocks import afterwards

_PAUSE = 0.0005  # seconds
_LONG = 60.0  # seconds that a planner waits for the calls of other threads before it warns

_lock = RLock()
_planner: int | None = None  # the thread that plans
calls: dict[int, int] = {}  # the number of nested sharded calls running in each thread


def begin_call(thread: int, outer: int) -> None:
    """Begin a sharded call in this `thread`, inside `outer` others, once no other thread plans. To end the call, set
    `calls[thread]` to `outer`: a single statement, which no interrupt (Ctrl-C) can split."""
    calls[thread] = outer + 1  # before reading `_planner`; a planner sets that before it reads `calls`
    while _planner is not None and _planner != thread:
        calls[thread] = 0
        with _lock:
            pass
        calls[thread] = outer + 1


@contextmanager
def planning() -> Iterator[None]:
    """A block during which no other thread is in such a block or in a sharded call. The calls of this thread are
    suspended meanwhile."""
    me = get_ident()
    resting = calls.get(me, 0)

    def resume() -> None:
        if resting:
            begin_call(me, resting - 1)

    with afterwards(resume):
        calls[me] = 0
        with _lock, without_dispatch_modes():
            before = _planner
            with afterwards(lambda: _set(before)):
                _set(me)
                _wait_for_calls(me)
                yield


def _wait_for_calls(planner: int) -> None:
    """Wait until no sharded call runs in another thread. (It polls, since calls do not signal their end.)"""
    start, warned = time.monotonic(), False
    while others := [thread for thread, count in calls.copy().items() if count and thread != planner]:
        time.sleep(_PAUSE)
        if not warned and time.monotonic() - start > _LONG:
            warned = True
            warnings.warn(
                f"planning has waited {_LONG:.0f} seconds for the sharded calls of other threads ({others}); a hook or "
                "a collective there may wait for this thread",
                stacklevel=2,
            )


def _set(planner: int | None) -> None:
    global _planner  # noqa: PLW0603 - read by every call, so it has to be cheap
    _planner = planner


def _renew() -> None:
    """Reset the state in a forked process, which lacks the other threads."""
    global _lock  # noqa: PLW0603 - the lock that one of them held would never be released
    _lock = RLock()
    _set(None)
    for thread in calls.keys() - {get_ident()}:
        del calls[thread]


os.register_at_fork(after_in_child=_renew)
