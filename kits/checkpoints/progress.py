"""A progress bar for saving and loading, for a person at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE = 2**30  # bytes of this process: fewer are done before anybody wonders


@contextmanager
def progress(what: str, total: int, rank: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr if it is a terminal, there is much to do, and this is rank 0. Yields a function that takes
    the number of bytes done."""
    if rank or total < LARGE or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.advance(task, done)
