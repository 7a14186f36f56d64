"""The progress of planning: lines of Python's logging, and a live line in a terminal.

`telling` surrounds the planning of one call, or the making of its program; stages inside are named and timed. At the
end the logger "partway.planning" gets one line with all of them, at level INFO. If stderr is a terminal and planning
takes more than two seconds, a live line shows the current stage. PARTWAY_LOG=info writes the log to stderr.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from partway.runtime.launching.process import get_rank
from partway.strategy import ContextError
from partway.strategy.basics.blocks import listening, meanwhile, under_way

PATIENCE = 2.0  # seconds until the live line appears
WIDEST = 10.0  # wider gaps are not shown
LEVELS = ("debug", "info", "warning", "error")
_log = logging.getLogger("partway.planning")
_cache = logging.getLogger("partway.cache")


class Telling:
    """The log of one piece of work.

    what       its name: "planning Classifier"
    seconds    of each finished stage, by its name
    made       the result, as text
    found      the state of a running search, as text
    """

    def __init__(self, what: str) -> None:
        self.what, self.made, self.found = what, "", ""
        self.seconds: dict[str, float] = {}
        self._start, self._stage = time.perf_counter(), ""
        self._live: Any = None
        self._spinner: Any = None
        self._lock = threading.Lock()
        self._ended = False
        self._timer = threading.Timer(PATIENCE, self._show) if _shows() else None

    def __enter__(self) -> Telling:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._live is not None:
                self._live.stop()

    def _show(self) -> None:
        """Show the live line. (Runs in the thread of a timer.)"""
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        with self._lock:
            if not self._ended:
                self._spinner = Spinner("dots", self._line())
                self._live = Live(
                    self._spinner,
                    console=Console(stderr=True),
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()

    def _line(self) -> Any:
        from rich.text import Text

        stage = f"{self._stage}, {self.found}" if self.found else self._stage
        return Text(f"{self.what}: {stage}" if stage else self.what)

    def hear(self, cost: float, bound: float) -> None:
        """Note that a search has found a plan of this cost, and the bound that no plan costs less than `bound`."""
        gap = max(cost - bound, 0.0) / bound if bound > 0 and cost < math.inf else math.inf
        self.found = f"bound {bound:.3g}, gap {100 * gap:.2g} %" if gap < WIDEST else ""
        self._update()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A block that is the stage `name`."""
        before, start = self._stage, time.perf_counter()
        self._at(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._at(before)

    def _at(self, name: str) -> None:
        self._stage, self.found = name, ""
        self._update()

    def _update(self) -> None:
        with self._lock:
            if self._live is not None and not self._ended:
                self._spinner.update(text=self._line())

    def text(self) -> str:
        """The line for the log."""
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items() if seconds >= 0.005)
        parts = [f"{self.what} took {time.perf_counter() - self._start:.2f} s", stages and f" ({stages})"]
        return "".join([*parts, self.made and f": {self.made}"])


@contextmanager
def telling(what: str) -> Iterator[Telling]:
    """A block that does `what`, such as "planning Classifier". Only the outermost of several has a live line."""
    with Telling(what) as told, meanwhile(telling=told), listening(told.hear):
        yield told
    _log.info("%s", told.text())


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A block that is a stage of the current `telling`, if there is one."""
    telling = under_way().telling
    with nullcontext() if telling is None else telling.stage(name):
        yield


def taken(name: str, where: object, seconds: float) -> None:
    """Log that `name` came from the cache."""
    _cache.info("took the %s from %s in %.2f s", name, where, seconds)
    if (telling := under_way().telling) is not None:
        telling.seconds[f"{name} from the cache"] = seconds


def _shows() -> bool:
    """Whether to show a live line."""
    return under_way().telling is None and sys.stderr is not None and sys.stderr.isatty() and get_rank() == 0


def level_asked() -> str:
    """The level that PARTWAY_LOG names; "" without it. Raises ContextError for an unknown level."""
    asked = os.environ.get("PARTWAY_LOG", "")
    level = asked.strip().lower()
    if asked and level not in LEVELS:
        raise ContextError(f"PARTWAY_LOG is {asked!r:.80}; write one of {', '.join(LEVELS)}")
    return level


def log_to_stderr() -> None:
    """Write log records of the level that PARTWAY_LOG names, or above, to stderr. An unknown level is only a warning:
    this runs at the import of partway, also in `partway doctor`, which reports the variable."""
    try:
        level = level_asked()
    except ContextError as error:
        warnings.warn(str(error), stacklevel=2)
        return
    logger, handler = logging.getLogger("partway"), logging.StreamHandler()
    rank = os.environ.get("RANK", "")
    of = f"rank {rank}: " if rank else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s: {of}%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
