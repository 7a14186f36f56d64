"""Blocks that restore something when they end, whatever ends them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Call `restore` when the block ends. It is called twice and must not mind: an interrupt (Ctrl-C) comes between any
    two lines, those of `restore` too, and one that cuts the first call short leaves it to the second."""
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off. Capturing a deep model and reading a large file make millions of objects that stay
    in use, and going through all of them again and again would take longer than the work itself."""
    enabled = gc.isenabled()
    with afterwards(lambda: gc.enable() if enabled else None):
        gc.disable()
        yield
