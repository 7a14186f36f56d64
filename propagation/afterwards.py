"""What is put back after a block, whatever ends it."""

from __future__ import annotations

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
