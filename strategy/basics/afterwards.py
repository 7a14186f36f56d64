"""Blocks that restore something when they end, also when an exception or an interrupt ends them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Call `restore` when the block ends. It is called twice, so it has to be idempotent: an interrupt (Ctrl-C) may cut
    the first call short at any line, and the second call completes it."""
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off. Capturing a deep model and reading a large file make millions of objects that stay
    in use, and the collector would take longer to traverse them again and again than the work itself."""
    enabled = gc.isenabled()
    with afterwards(lambda: gc.enable() if enabled else None):
        gc.disable()
        yield
