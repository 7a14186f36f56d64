"""One thread plans at a time, and meanwhile no sharded call runs in another.

What a capture changes, it changes for the whole process: PyTorch's tracers replace methods of nn.Module and Function,
modules have other forwards and fake parameters for a while, warnings and loggers are silent, and garbage is not
collected. So a planner is alone: it waits for the sharded calls that run, those that come later wait for it, and a plan
that two of them need is made once. As with torch.compile, plain calls of other threads do not wait.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

from partway.propagation.torch_internals import without_dispatch_modes
from partway.strategy.basics.afterwards import afterwards

_PAUSE = 0.0005  # seconds
_LONG = 60.0  # seconds that a planner waits for the calls of other threads before it says so

_lock = RLock()
_planner: int | None = None  # the thread that plans
calls: dict[int, int] = {}  # how many sharded calls, one inside another, run in each thread


def begin_call(thread: int, outer: int) -> None:
    """A sharded call begins in this `thread`, inside of `outer` others, once no other thread plans. What ends it sets
    `calls[thread]` to `outer` again, in one statement, which no interrupt (Ctrl-C) can cut in two."""
    calls[thread] = outer + 1  # before it is asked who plans; a planner says so before it asks for calls
    while _planner is not None and _planner != thread:
        calls[thread] = 0
        with _lock:
            pass
        calls[thread] = outer + 1


@contextmanager
def planning() -> Iterator[None]:
    """No other thread is in such a block or in a sharded call. The calls that this thread is in rest meanwhile."""
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
    """Return when no sharded call runs in another thread. (It looks again and again: a call signals nothing.)"""
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
    """In a forked process, where the other threads do not exist."""
    global _lock  # noqa: PLW0603 - the lock that one of them held would never be released
    _lock = RLock()
    _set(None)
    for thread in calls.keys() - {get_ident()}:
        del calls[thread]


os.register_at_fork(after_in_child=_renew)
