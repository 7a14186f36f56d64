"""Python's garbage collection, put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .afterwards import afterwards


@contextmanager
def uncollected() -> Iterator[None]:
    """Puts garbage collection off. What capture leaves of a deep model, and what a large file is read into, is millions
    of objects that are in use, and looking through all of them again and again would take longer than the work does."""
    enabled = gc.isenabled()
    with afterwards(lambda: gc.enable() if enabled else None):
        gc.disable()
        yield
