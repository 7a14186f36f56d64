"""Which ranks the others wait for: where some are slower, the others spend more of their time in collectives.

What a rank waits in collectives adds up in `waits()`. Every _LOOKS turns of its ledger each rank leaves word of the
share of its time that this was; the first rank compares, and logs which ranks are slower than the others when those are
other ones than before. Over NCCL the host does not wait in collectives, so that nothing is seen.

(To look at the frames of other threads instead would change what they do: what a frame refers to lives longer then, by
which torch.export fails and autograd copies gradients.)
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
_CLEAR = 0.2  # the least difference between shares of waits that is said
_log = logging.getLogger("partway")


class Waits:
    """The seconds that this process has waited in collectives, which are the blocks within it, and since when it
    does."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds, self._since = self._seconds + time.monotonic() - self._since, 0.0

    def total(self) -> float:
        """Up to now."""
        since = self._since  # the thread that waits goes on meanwhile
        return self._seconds + (time.monotonic() - since if since else 0.0)


def waits() -> Waits:
    """Those of this process since it has the process group that there is."""
    return of_world(Waits)


class Looks:
    """Those of one rank at what it waits. `store` is a connection of the thread that looks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._slow: tuple[int, ...] = ()
        self._waits = waits()
        self._count, self._begin, self._waited = 0, time.monotonic(), self._waits.total()

    def look(self) -> None:
        """Leave word and compare, if it is time. Raises RuntimeError where the store has gone."""
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
    0 to 1, that each rank waited, if that is clear."""
    ranks = sorted(range(len(shares)), key=shares.__getitem__)
    gaps = [shares[after] - shares[rank] for rank, after in itertools.pairwise(ranks)][: len(ranks) // 2]
    widest = max(gaps, default=0.0)
    return tuple(sorted(ranks[: gaps.index(widest) + 1])) if widest >= _CLEAR else ()


def told(shares: Sequence[float], slow: Sequence[int]) -> str:
    """What to say of the `slow` ranks."""
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
