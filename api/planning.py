"""One thread plans at a time, and meanwhile no sharded call begins in another.

What a capture changes, it changes for the whole process: PyTorch's tracers replace methods of nn.Module and Function,
modules have other forwards and parameters for a while, warnings and loggers are silent, and garbage is left. So who
plans is alone, and sharded calls of other threads wait until it is done; a plan that two of them need is made once.
Plain calls of other threads are not kept waiting, as they are not by torch.compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

from partway.propagation.afterwards import afterwards

_lock = RLock()
_planner: int | None = None  # the thread that plans


@contextmanager
def planning() -> Iterator[None]:
    """No other thread is in such a block."""
    with _lock:
        before = _planner
        with afterwards(lambda: _set(before)):
            _set(get_ident())
            yield


def wait_for_planning() -> None:
    """Return when no other thread plans."""
    if _planner is not None and _planner != get_ident():
        with _lock:
            pass


def _set(planner: int | None) -> None:
    global _planner  # noqa: PLW0603 - read by every call, so it has to be cheap
    _planner = planner


def _renew() -> None:
    """In a forked process, where the thread that planned does not exist."""
    global _lock  # noqa: PLW0603 - the lock that it held would never be released
    _lock = RLock()
    _set(None)


os.register_at_fork(after_in_child=_renew)
