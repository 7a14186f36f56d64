"""The display of `partway ps` while a job runs: its workers and servers, pushes a second, the version, staleness."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_EVERY = 1.0  # seconds between two looks


class LiveTable:
    """A table that is redrawn each second; without a terminal, a line for each event."""

    def __init__(self, quiet: bool, out: TextIO) -> None:
        self._out, self._console = out, Console(file=out)
        self._live: Live | None = None
        if not quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._quiet, self._last, self._events = quiet, 0.0, 0
        self._before: tuple[float, int] | None = None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print an event."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(f"partway ps: {text}")
        else:
            self._out.write(f"partway ps: {text}\n")
            self._out.flush()

    def show(self, ask: Callable[[], Any], starts: Mapping[int, int]) -> None:
        """Show the state that `ask` returns, if it is time. `starts`: how often each worker was started."""
        if time.monotonic() - self._last < _EVERY or self._quiet:
            return
        self._last = time.monotonic()
        status = ask()
        if status is None:
            return
        events = status["events"]
        for text in events[max(0, len(events) - (status["happened"] - self._events)) :]:
            self.say(text)
        self._events = status["happened"]
        if self._live is not None and status["reports"]:
            self._live.update(self._drawn(status, starts), refresh=True)

    def _drawn(self, status: Mapping[str, Any], starts: Mapping[int, int]) -> Group:
        applied = max(report["applied"] for report in status["reports"])
        now = time.monotonic()
        rate = ""
        if self._before is not None and now > self._before[0]:
            rate = f", {(applied - self._before[1]) / (now - self._before[0]):.1f} pushes/s"
        self._before = now, applied
        bound = "" if status["mode"] == "sync" else f", staleness {_staleness(status)}"
        head = Text(f"{status['mode']}, step {status['version']}{rate}{bound}")
        return Group(head, workers_table(status, starts), servers_table(status))


def _staleness(status: Mapping[str, Any]) -> str:
    recent = [stale for report in status["reports"] for _, _, stale in report["staleness"][-100:]]
    bound = status["max_staleness"]
    most = max(recent, default=0)
    mean = sum(recent) / len(recent) if recent else 0.0
    return f"{mean:.1f}, at most {most} (bound {'none' if bound is None else bound})"


def workers_table(status: Mapping[str, Any], starts: Mapping[int, int]) -> Table:
    """The workers of a job."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "where", "steps", "starts", "state"):
        table.add_column(name, justify="right" if name in ("steps", "starts") else "left")
    for worker, each in sorted(status["workers"].items()):
        state = "ends" if each["leaves"] else f"waits {each['waits']}" if each["waits"] else "computes"
        if each["silent"] > 3:
            state = f"silent for {each['silent']:.0f} s"
        table.add_row(
            str(worker), each["card"], str(each["steps"]), str(starts.get(worker, each["incarnation"])), state
        )
    return table


def servers_table(status: Mapping[str, Any]) -> Table:
    """The servers of a job."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("server", "MB", "pieces", "version", "applied", "asked again"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for each in status["reports"]:
        numbers = [f"{each['bytes'] / 1e6:.1f}", each["pieces"], each["version"], each["applied"], each["repeated"]]
        table.add_row(each["name"], *map(str, numbers))
    return table
