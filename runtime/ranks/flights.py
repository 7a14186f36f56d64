"""Collectives that a GPU was given and has not finished, by PyTorch's flight recorder, and the end of a rank that waits
in vain.

Over gloo a rank that waits for others is in a call, which ends with an error. Over NCCL its code runs ahead of the
waiting GPU, until it needs a number and waits within CUDA, where nothing can be raised; PyTorch ends the process after
the timeout, without a word of the others. So a thread looks once a second at the unfinished collectives, asks the ranks
that have not come to them for their activity, and if they cannot come any more ends the process with the answers. An
error would not do: to reach the waiting code, the collective would have to be given up, and then that code could go on
with numbers that nobody has computed, as could the work in the GPU's queue: the optimizer's step.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .doing import ENDED, GONE, MEETS, Doing, lines_of, named

_LOOK = 1.0  # seconds between two looks
_SURE = 3  # looks without any change
_LATE = 60.0  # seconds after which a warning tells of a wait
_SHOWN = 3  # collectives that an error describes
_log = logging.getLogger("partway")


@dataclass(frozen=True)
class Flight:
    """An unfinished collective.

    group    the name of its process group, and `number` its place among those of the group
    ranks    of the group
    text     describes it and its group
    since    seconds since it was given
    limit    seconds after which PyTorch gives up
    """

    group: str
    number: int
    ranks: tuple[int, ...]
    text: str
    since: float
    limit: float


def flights(recorded: Mapping[str, Any], now: float) -> list[Flight]:
    """The unfinished collectives of a record, the oldest first. `now`: the time, in seconds since 1970."""
    found = []
    for entry in recorded.get("entries", ()):
        name, about = entry["process_group"]
        ranks = recorded["pg_config"].get(name, {}).get("ranks", "[]")
        if entry["state"] != "completed" and not entry["retired"]:
            found.append(
                Flight(
                    name,
                    _number(entry),
                    tuple(json.loads(ranks)),
                    f"{_what(entry)} ({about})",
                    now - entry["time_created_ns"] / 1e9,
                    entry["timeout_ms"] / 1e3,
                )
            )
    return found


def given(recorded: Mapping[str, Any]) -> dict[str, int]:
    """How many collectives each group has been given, by its name."""
    counts: dict[str, int] = {}
    for entry in recorded.get("entries", ()):
        name = entry["process_group"][0]
        counts[name] = max(counts.get(name, 0), _number(entry))
    return counts


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])


def _what(entry: Mapping[str, Any]) -> str:
    sizes = entry["input_sizes"]
    shown = f"{entry['input_dtypes'][0].lower()} {sizes[0]}" if len(sizes) == 1 else f"{len(sizes)} tensors"
    return f"{entry['profiling_name'].rpartition(':')[2]} of {shown}"


class Overdue:
    """The thread that looks for overdue collectives. `record` returns the record: counts, with or without the entries
    of collectives under way; `ask` the activities of ranks; `end` ends this process with a text."""

    def __init__(
        self,
        rank: int,
        record: Callable[[bool], Mapping[str, Any]],
        ask: Callable[[Sequence[int]], dict[int, Doing]],
        end: Callable[[str], object],
    ) -> None:
        self._rank, self._record, self._ask, self._end = rank, record, ask, end
        self._looks: list[dict[int, Doing]] = []
        self._first: tuple[str, int] | None = None
        self._warned = False
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="partway flights", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            try:
                self.look()
            except Exception as error:  # a record of another PyTorch; training must not end because of it
                _log.warning(
                    "PyTorch's record of collectives cannot be read (%s: %s): where ranks wait for each other over "
                    "NCCL, PyTorch alone tells of it",
                    type(error).__name__,
                    error,
                )
                return

    def look(self) -> None:
        """Look once."""
        status = self._record(False)["pg_status"].values()
        if all(each["last_enqueued_collective"] == each["last_completed_collective"] for each in status):
            self._first = None
            return
        under_way = flights(self._record(True), time.time())
        first = (under_way[0].group, under_way[0].number) if under_way else None
        if first != self._first:  # there is progress
            self._first, self._looks, self._warned = first, [], False
            return
        if not under_way:
            return
        flight = under_way[0]
        peers = [rank for rank in flight.ranks if rank != self._rank]
        missing = {
            rank: doing for rank, doing in self._ask(peers).items() if doing.given.get(flight.group, 0) < flight.number
        }
        self._looks = [*self._looks, missing][-_SURE:]
        if why := self._hopeless():
            self._end(self._told(under_way, missing, why))
        elif not self._warned and flight.since > min(_LATE, flight.limit / 2):
            self._warned = True
            sys.stderr.write(f"partway: {self._told(under_way, missing, 'has not come yet')}\n")
            sys.stderr.flush()

    def _hopeless(self) -> str:
        """Why the missing ranks will not come, if that is certain; else ""."""
        last = self._looks[-1]
        if any(doing.mark == ENDED for doing in last.values()):
            return "cannot come"
        same = len(self._looks) == _SURE and all(look == last for look in self._looks)
        marks = {doing.mark for doing in last.values()} if same else set[str]()
        return "waits for all ranks elsewhere" if marks == {MEETS} else "cannot come" if marks == {GONE} else ""

    def _told(self, under_way: Sequence[Flight], missing: Mapping[int, Doing], why: str) -> str:
        first, more = under_way[0], len(under_way) - _SHOWN
        lines = [f"  not over here: {each.text}, for {each.since:.0f} s" for each in under_way[:_SHOWN]]
        lines += [f"  and {more} more after them"] if more > 0 else []
        who = f"{named(sorted(missing))} {why}" if missing else "all of its ranks have come"
        return "\n".join(
            [f"the GPU of rank {self._rank} waits in {first.text} for {first.since:.0f} s, and {who}:"]
            + ([lines_of(dict(missing))] if missing else [])
            + lines
        )


def end_process(text: str) -> None:
    """Write `text` to stderr and end this process at once, with status 1: its main thread waits within CUDA."""

    def flush() -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()

    flusher = threading.Thread(target=flush, daemon=True)  # the waiting thread may hold the stream
    flusher.start()
    flusher.join(1.0)
    sys.stderr.write(f"partway: {text}\n")
    sys.stderr.flush()
    os._exit(1)
