"""Find slow ranks: the others spend more of their time waiting in collectives.

The time that a rank waits in collectives adds up in `waits()`. Every _LOOKS turns of its ledger each rank reports the
share of its time that it waited; the first rank compares, and logs which ranks are slower than the others if they are
not those of its last message. Over NCCL the host does not wait in collectives, so nothing is seen.

(Looking at the frames of other threads would change their behavior: the objects that a frame refers to live longer
then, which makes torch.export fail and autograd copy gradients.)
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from .doing import named
from .world import of_world

_LOOKS = 120  # turns of a ledger: a minute
_CLEAR = 0.2  # the least difference between shares of waits that is reported
_log = logging.getLogger("partway")


class Waits:
    """The seconds that this process has waited in collectives; each wait is a `with` block on this object."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds, self._since = self._seconds + time.monotonic() - self._since, 0.0

    def total(self) -> float:
        """The seconds up to now."""
        since = self._since  # the waiting thread goes on meanwhile
        return self._seconds + (time.monotonic() - since if since else 0.0)


def waits() -> Waits:
    """The waits of this process since the start of the current process group."""
    return of_world(Waits)


class Looks:
    """Reports and compares the waits of one rank. `store` is a connection of the thread that looks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._slow: tuple[int, ...] = ()
        self._waits = waits()
        self._count, self._begin, self._waited = 0, time.monotonic(), self._waits.total()

    def look(self) -> None:
        """Report and compare, if it is time. Raises RuntimeError if the store has gone."""
        self._count += 1
        if self._count % _LOOKS:
            return
        now, waited = time.monotonic(), self._waits.total()
        share = (waited - self._waited) / (now - self._begin)
        self._begin, self._waited = now, waited
        self._store.set(f"waits/{self._rank}", f"{share:.3f}")
        keys = [f"waits/{rank}" for rank in range(self._size)]
        if self._rank == 0 and self._store.check(keys):
            self._compare([float(self._store.get(key)) for key in keys])

    def _compare(self, shares: Sequence[float]) -> None:
        before, self._slow = self._slow, slow_in(shares)
        if self._slow and self._slow != before:
            _log.warning("%s", told(shares, self._slow))


def slow_in(shares: Sequence[float]) -> tuple[int, ...]:
    """The ranks that the others wait for, half of all at most: those below the widest gap between the `shares` of time,
    0 to 1, that each rank waited, if the gap is clear."""
    ranks = sorted(range(len(shares)), key=shares.__getitem__)
    gaps = [shares[after] - shares[rank] for rank, after in itertools.pairwise(ranks)][: len(ranks) // 2]
    widest = max(gaps, default=0.0)
    return tuple(sorted(ranks[: gaps.index(widest) + 1])) if widest >= _CLEAR else ()


def told(shares: Sequence[float], slow: Sequence[int]) -> str:
    """The message about the `slow` ranks."""
    others = [rank for rank in range(len(shares)) if rank not in slow]
    return (
        f"{named(slow)} {'is' if len(slow) == 1 else 'are'} slower than the others: of the last minute {named(others)} "
        f"waited in collectives for {_said(shares, others)}, and {named(slow)} for {_said(shares, slow)}; see what "
        f"{'it does' if len(slow) == 1 else 'they do'} between collectives, such as loading data, and what else runs "
        "there"
    )


def _said(shares: Sequence[float], ranks: Sequence[int]) -> str:
    least, most = (f(round(100 * shares[rank]) for rank in ranks) for f in (min, max))
    return f"{least} %" if least == most else f"{least} to {most} %"
